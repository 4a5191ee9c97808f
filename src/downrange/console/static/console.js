// What every page does: tells the server its time zone, refreshes what is sampled, and listens to the keyboard.
"use strict";
(() => {
  const remember = (name, value) => {
    const secure = location.protocol === "https:" ? "; Secure" : "";
    document.cookie = `${name}=${encodeURIComponent(value)}; Path=/; Max-Age=31536000; SameSite=Strict${secure}`;
  };
  const recalled = (name) => {
    const found = document.cookie.split("; ").find((one) => one.startsWith(name + "="));
    return found ? decodeURIComponent(found.slice(name.length + 1)) : "";
  };
  const texts = JSON.parse(document.body.dataset.texts);
  const announce = (text) => { document.getElementById("announce").textContent = text; };

  // Times are rendered by the server, in the zone of the browser.
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (zone && !recalled("zone")) {
    remember("zone", zone);
    if (zone !== "UTC" && !document.querySelector("form[method=post]:focus-within")) location.reload();
  }

  // --- refreshing: every few seconds, never while hidden, more slowly while the server does not answer
  const page = document.getElementById("page");
  const freshness = document.getElementById("freshness");
  const every = Number(page && page.dataset.live) * 1000;
  const live = texts.live.replace("{seconds}", every / 1000);
  let failures = 0;
  let timer = 0;
  const busy = () => {
    const at = document.activeElement;
    const chosen = String(getSelection()).length > 0;
    return chosen || (at && at.closest("form[method=post], [data-filter], #find") && at.matches("input, textarea, select"));
  };
  const refresh = async () => {
    timer = 0;
    if (document.hidden || !every) return;
    if (busy()) { later(); return; }
    try {
      const got = await fetch(location.href, { headers: { "HX-Request": "true" }, credentials: "same-origin" });
      if (got.redirected && new URL(got.url).pathname === "/login") { location.reload(); return; }
      const text = await got.text();
      const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("page");
      if (got.ok && fresh && !busy()) {
        await htmx.swap({ target: page, text: fresh.innerHTML, swap: "innerMorph", transition: false });
        const side = new DOMParser().parseFromString(text, "text/html").querySelector("nav.side");
        const old = document.querySelector("nav.side");
        if (side && old) copyBadges(side, old);
        document.dispatchEvent(new Event("console:refreshed"));
      }
      failures = 0;
      freshness.textContent = live;
    } catch (error) {
      failures += 1;
      freshness.textContent = texts.silent;
    }
    later();
  };
  const copyBadges = (from, to) => {
    const fresh = [...from.querySelectorAll("a")];
    [...to.querySelectorAll("a")].forEach((link, at) => {
      const now = fresh[at] && fresh[at].querySelector(".count");
      const then = link.querySelector(".count");
      if (then) then.remove();
      if (now) link.append(document.importNode(now, true));
    });
  };
  const later = (wait = every) => {
    if (!timer && every) timer = setTimeout(refresh, wait * Math.min(12, 2 ** failures));
  };
  if (every && freshness) {
    freshness.textContent = live;
    later("soon" in page.dataset ? 1000 : every); // figures that were old are asked for as soon as somebody looks
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && !timer) refresh();
    });
  }

  // --- the keyboard
  const help = document.getElementById("help");
  const openHelp = () => { if (help && !help.open) help.showModal(); };
  const button = document.getElementById("help-button");
  if (button) button.addEventListener("click", openHelp);
  let goes = 0;
  let row = -1;
  const rows = () => [...document.querySelectorAll("main .table tbody tr")].filter((one) => one.querySelector("a"));
  const choose = (step) => {
    const all = rows();
    if (!all.length) return;
    row = Math.max(0, Math.min(all.length - 1, row + step));
    all.forEach((one, at) => one.classList.toggle("chosen", at === row));
    all[row].querySelector("a").focus();
    all[row].scrollIntoView({ block: "nearest" });
  };
  document.addEventListener("keydown", (press) => {
    if (press.ctrlKey || press.metaKey || press.altKey) return;
    if (press.target.matches("input, textarea, select, [contenteditable]")) {
      if (press.key === "Escape") press.target.blur();
      return;
    }
    if (help && help.open) return;
    if (goes && Date.now() - goes < 1500) {
      goes = 0;
      const link = document.querySelector(`nav.side a[data-key="${CSS.escape(press.key)}"]`);
      if (link) { press.preventDefault(); link.click(); }
      return;
    }
    switch (press.key) {
      case "/": { const find = document.getElementById("find"); if (find) { press.preventDefault(); find.focus(); find.select(); } break; }
      case "g": goes = Date.now(); break;
      case "j": choose(1); break;
      case "k": choose(-1); break;
      case "?": openHelp(); break;
    }
  });

  // --- small helpers of pages
  document.addEventListener("click", async (click) => {
    const copy = click.target.closest("[data-copy]");
    if (copy) {
      const from = copy.dataset.copy;
      const text = from === "link" ? location.href : document.getElementById(from).textContent;
      try { await navigator.clipboard.writeText(text); announce(texts.copied); copy.textContent = texts.copied; }
      catch (error) { announce(texts.uncopied); }
    }
    const all = click.target.closest("[data-tick-all]");
    if (all) document.querySelectorAll('input[name="id"]').forEach((one) => { one.checked = all.checked; });
  });
  document.addEventListener("input", (input) => {
    const wanted = input.target.dataset.mustEqual;
    if (wanted !== undefined) {
      const submit = input.target.form.querySelector("button");
      if (submit) submit.disabled = input.target.value !== wanted;
    }
  });
  document.querySelectorAll("[data-must-equal]").forEach((one) => {
    const submit = one.form.querySelector("button");
    if (submit) submit.disabled = one.value !== one.dataset.mustEqual;
  });
  const settings = document.getElementById("look");
  if (settings) settings.addEventListener("change", () => {
    remember("theme", settings.elements.theme.value);
    remember("dense", settings.elements.dense.checked ? "1" : "0");
    remember("zone", settings.elements.zone.value || zone);
    document.documentElement.dataset.theme = settings.elements.theme.value;
    document.documentElement.toggleAttribute("data-dense", settings.elements.dense.checked);
    announce(texts.kept);
  });

  // --- SQL92 is checked while it is typed
  let checking = 0;
  document.addEventListener("input", (input) => {
    const address = input.target.dataset.check;
    if (!address) return;
    clearTimeout(checking);
    const field = input.target;
    checking = setTimeout(async () => {
      const hint = document.getElementById(field.getAttribute("aria-describedby"));
      if (!field.value.trim()) { hint.textContent = ""; field.removeAttribute("aria-invalid"); return; }
      const got = await fetch(`${address}?sql=${encodeURIComponent(field.value)}`);
      const said = await got.json();
      hint.textContent = said.error || texts.right;
      hint.className = said.error ? "hint bad" : "hint good";
      field.setAttribute("aria-invalid", said.error ? "true" : "false");
    }, 200);
  });

  // --- a running job tells how far it is
  const job = document.querySelector("[data-job]");
  if (job && window.EventSource) {
    let stream = null;
    const open = () => {
      if (stream || document.hidden) return;
      stream = new EventSource(job.dataset.job);
      stream.addEventListener("job", (event) => {
        const said = JSON.parse(event.data);
        const bar = document.getElementById("job-progress");
        bar.max = said.total; bar.value = said.sent + said.failed;
        document.getElementById("job-words").textContent = said.words;
        if (said.state !== job.dataset.state) { stream.close(); location.reload(); }
      });
    };
    const close = () => { if (stream) { stream.close(); stream = null; } };
    document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
    window.addEventListener("pagehide", close);
    open();
  }
})();
