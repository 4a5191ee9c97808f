// Charts: data come as JSON from the address in data-chart, every ten seconds; one cursor over all charts of a page.
"use strict";
(() => {
  const dashes = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
  const colours = ["--one", "--two", "--three", "--four"];
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const two = (n) => String(n).padStart(2, "0");
  const clock = (seconds) => { const d = new Date(seconds * 1000); return `${two(d.getHours())}:${two(d.getMinutes())}`; };
  const exact = (seconds) => `${clock(seconds)}:${two(new Date(seconds * 1000).getSeconds())}`;
  const figure = (n) => (n == null ? "" : n.toLocaleString("en", { maximumFractionDigits: n < 10 ? 1 : 0 }));
  const compact = (n) => (n >= 10000 ? n.toLocaleString("en", { notation: "compact" }) : figure(n));
  const newest = (plot, series) => plot.data[series][plot.data[series].length - 1];
  const texts = JSON.parse(document.body.dataset.texts);
  const plots = new Map();

  // From the data: of a single figure, which there is at the start, uPlot would make a day.
  const reach = (plot) => { const times = plot.data[0], last = times[times.length - 1]; return [Math.min(times[0], last - 60), last]; };

  const marks = (chart) => (plot) => {
    const draw = plot.ctx;
    (chart.marks || []).forEach((mark) => {
      const x = plot.valToPos(mark.at, "x", true);
      if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) return;
      draw.save();
      draw.strokeStyle = style("--second"); draw.fillStyle = style("--second");
      draw.setLineDash([3, 3]); draw.beginPath();
      draw.moveTo(x, plot.bbox.top); draw.lineTo(x, plot.bbox.top + plot.bbox.height); draw.stroke();
      draw.font = `${11 * devicePixelRatio}px system-ui`;
      draw.fillText(texts[mark.label] || mark.label, x + 4, plot.bbox.top + 12 * devicePixelRatio);
      draw.restore();
    });
  };

  const build = (box, series, chart) => {
    const axis = { stroke: style("--second"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") }, font: "12px system-ui" };
    const second = series.some((one) => one.scale === "second");
    const options = {
      width: box.clientWidth, height: 180,
      cursor: { sync: { key: "console" }, drag: { x: false, y: false } },
      scales: { x: { time: true, range: reach },
        y: { range: (_, __, most) => [0, most > 0 ? most * 1.05 : 1] }, second: { range: (_, __, most) => [0, most > 0 ? most * 1.05 : 1] } },
      axes: [{ ...axis, space: 72, values: (_, ticks) => ticks.map(ticks.length > 1 && ticks[1] - ticks[0] < 60 ? exact : clock) }, { ...axis, size: 64, values: (_, ticks) => ticks.map(compact) }]
        .concat(second ? [{ ...axis, side: 1, scale: "second", size: 64, grid: { show: false }, values: (_, ticks) => ticks.map((n) => compact(n) + " s") }] : []),
      series: [{ label: texts.time, value: (plot, at) => exact(at ?? newest(plot, 0)) }].concat(series.map((one, at) => ({
        label: one.label, scale: one.scale || "y", stroke: style(colours[at]), width: 2, dash: dashes[at], spanGaps: false,
        points: { show: chart.data[0].length < 3 }, value: (plot, n, which) => figure(n ?? newest(plot, which)),
      }))),
      hooks: { draw: [marks(chart)] },
    };
    return new uPlot(options, chart.data, box);
  };

  const load = async (box) => {
    const got = await fetch(box.dataset.chart, { credentials: "same-origin" });
    if (!got.ok) return;
    const chart = await got.json();
    if (!chart.data[0].length) return;
    const known = plots.get(box);
    if (known) { known.chart.marks = chart.marks; known.plot.setData(chart.data); return; }
    const kept = { chart };
    kept.plot = build(box, JSON.parse(box.dataset.series), chart);
    plots.set(box, kept);
    if (box.dataset.pick) kept.plot.over.addEventListener("click", () => {
      const at = kept.plot.posToVal(kept.plot.cursor.left, "x");
      const field = document.getElementById(box.dataset.pick);
      if (field) { const d = new Date(at * 1000); field.value = `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}T${clock(at)}:${two(d.getSeconds())}`; field.focus(); }
    });
  };
  const all = () => { if (!document.hidden) document.querySelectorAll("[data-chart]").forEach((box) => load(box).catch(() => {})); };
  const again = () => { plots.forEach((kept, box) => { kept.plot.destroy(); }); plots.clear(); all(); };
  all();
  setInterval(all, 10000);
  new MutationObserver(again).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("resize", () => plots.forEach((kept, box) => kept.plot.setSize({ width: box.clientWidth, height: 180 })));
})();
