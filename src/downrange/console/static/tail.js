// The live tail: keeps 5,000 rows and draws those that can be seen, into elements that are used again.
"use strict";
(() => {
  const box = document.getElementById("tail");
  if (!box) return;
  const texts = JSON.parse(box.dataset.texts);
  const fits = (text, parts) => text.replace(/\{(\w+)\}/g, (_, name) => parts[name]);
  const HEIGHT = 24, MOST = 5000;
  const space = box.querySelector(".space");
  const status = document.getElementById("tail-status");
  const spoken = document.getElementById("tail-spoken");
  const pause = document.getElementById("pause");
  const two = (n) => String(n).padStart(2, "0");
  const clock = (millis) => { const d = new Date(millis); return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}.${String(d.getMilliseconds()).padStart(3, "0")}`; };
  const hidden = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
  const visible = (text) => text.replace(hidden, (one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
  let rows = [], seen = 0, shown = 0, dirty = false, paused = false, stream = null, note = "", lines = [];
  const since = new Date();
  let rate = 0, drawn = 0, windowMatched = 0, windowShown = 0, windowAt = performance.now();
  let follows = true;

  const line = () => {
    const one = document.createElement("div");
    one.className = "line";
    const time = document.createElement("a"), place = document.createElement("span"), tag = document.createElement("span"), key = document.createElement("span"), body = document.createElement("span");
    one.append(time, place, tag, key, body);
    space.append(one);
    return one;
  };
  const fill = (one, row) => {
    const [time, place, tag, key, body] = one.children;
    const [at, broker, queue, offset, tags, keys, text] = row;
    time.textContent = clock(at);
    time.href = [box.dataset.place, box.dataset.topic, broker, queue, offset].map((part, n) => (n ? encodeURIComponent(part) : part)).join("/");
    place.textContent = visible(`${broker} ${queue} @${Number(offset).toLocaleString("en")}`);
    tag.textContent = visible(tags);
    key.textContent = visible(keys);
    body.textContent = visible(text);
  };
  const draw = () => {
    dirty = false;
    space.style.height = `${rows.length * HEIGHT}px`;
    if (follows && !paused) box.scrollTop = rows.length * HEIGHT;
    const first = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - 2);
    const count = Math.min(rows.length - first, Math.ceil(box.clientHeight / HEIGHT) + 4);
    while (lines.length < count) lines.push(line());
    lines.forEach((one, at) => {
      one.hidden = at >= count;
      if (at < count) { one.style.transform = `translateY(${(first + at) * HEIGHT}px)`; fill(one, rows[first + at]); }
    });
  };
  const later = () => { if (!dirty) { dirty = true; requestAnimationFrame(draw); } };
  const tell = () => {
    const now = performance.now(), seconds = (now - windowAt) / 1000;
    rate = windowMatched / seconds; drawn = windowShown / seconds;
    windowMatched = windowShown = 0; windowAt = now;
    const figure = (n) => Math.round(n).toLocaleString("en");
    const skipped = drawn < rate * 0.99 ? fits(texts.shown, { shown: figure(drawn) }) : "";
    const parts = [fits(texts.match, { rate: figure(rate) }) + skipped, fits(texts.seen, { seen: figure(seen), time: clock(since).slice(0, 8) })];
    if (paused) parts.push(texts.paused);
    if (note) parts.push(note);
    status.textContent = parts.join(" · ");
    status.dataset.seen = seen;
    status.dataset.shown = shown;
  };
  const open = () => {
    if (stream || document.hidden || paused) return;
    stream = new EventSource(box.dataset.stream);
    stream.addEventListener("open", (event) => {
      if (!event.data) return; // the connection is there, the tail not yet
      box.dataset.open = "";
      if (JSON.parse(event.data).filtered_here) note = texts.here;
    });
    stream.addEventListener("batch", (event) => {
      const batch = JSON.parse(event.data);
      seen += batch.matched; shown += batch.rows.length; windowMatched += batch.matched; windowShown += batch.rows.length;
      rows = rows.concat(batch.rows);
      if (rows.length > MOST) rows = rows.slice(rows.length - MOST);
      later();
    });
    stream.addEventListener("failed", (event) => { status.textContent = JSON.parse(event.data).error; close(); });
    stream.onerror = () => { if (stream && stream.readyState === EventSource.CLOSED) { status.textContent = texts.ended; stream = null; } };
  };
  const close = () => { if (stream) { stream.close(); stream = null; delete box.dataset.open; } };
  const toggle = () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? texts.go_on : texts.pause;
    if (paused) close(); else open();
    tell();
  };
  pause.hidden = false;
  pause.addEventListener("click", toggle);
  document.addEventListener("keydown", (press) => {
    if (press.key === " " && !press.target.matches("input, textarea, select, button, a")) { press.preventDefault(); toggle(); }
  });
  box.addEventListener("scroll", () => { follows = box.scrollTop + box.clientHeight >= rows.length * HEIGHT - 2 * HEIGHT; later(); }, { passive: true });
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  setInterval(tell, 1000);
  setInterval(() => { spoken.textContent = status.textContent; }, 5000); // for screen readers: not every second
  open();
})();
