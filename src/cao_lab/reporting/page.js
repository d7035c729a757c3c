"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const names = {
    train_loss: "train loss", train_accuracy: "train accuracy", test_loss: "test loss", test_accuracy: "test accuracy",
    epoch: "epochs", seconds: "seconds of training", cost: "gradient evaluations",
  };
  const state = { setting: null, level: 0, methods: new Set(), seeds: new Set() };
  const darkness = matchMedia("(prefers-color-scheme: dark)");

  // All statistics come from Python: the page only looks them up.
  const threshold = () => state.setting.levels[state.level];
  const times = () => state.setting.times[state.level];
  const runsOf = (method) =>
    state.setting.runs.filter((run) => run.method === method && state.seeds.has(run.seed));
  const finite = (values) => values.filter((value) => value !== null && Number.isFinite(value));

  function drawTimes() {
    const body = element("times").tBodies[0];
    const labels = [...element("times").tHead.rows[0].cells].map((cell) => cell.textContent);
    const { methods, speedups } = times();
    const reference = speedups[Number(element("baseline").value)];
    body.replaceChildren();
    state.setting.methods.forEach((method, place) => {
      if (!state.methods.has(place)) return;
      const row = body.insertRow();
      [method.name, ...methods[place].cells, ...reference[place]].forEach((text, index) => {
        const cell = row.insertCell();
        cell.textContent = text;
        cell.dataset.label = labels[index];
        if (text === "not reached") cell.className = "unreached";
      });
      row.cells[0].prepend(swatch(method));
      row.dataset.label = method.label;
    });
  }

  function swatch(method) {
    const mark = document.createElement("span");
    mark.className = "swatch";
    mark.style.setProperty("--colour", strokeOf(method));
    mark.dataset.dash = dashOf(method);
    if (method.marker) mark.dataset.marker = method.marker;
    return mark;
  }

  // Controls are told apart by their dashes, the others by colours that were chosen for the colour-blind as well.
  function dashOf(method) {
    const controls = state.setting.methods.filter((one) => one.isDashed);
    return method.isDashed ? ["dash", "dot", "dashdot", "longdash"][controls.indexOf(method) % 4] : "solid";
  }

  // On a dark ground every colour is mixed with white, so that the deep ones can be seen.
  const shade = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16))
    .map((part) => (darkness.matches ? Math.round(0.65 * part + 0.35 * 255) : part));
  const coloured = (hex, alpha = 1) => `rgba(${shade(hex).join(",")},${alpha})`;
  const strokeOf = (method) => coloured(method.colour);

  function tracesOf(method, place) {
    const quantity = element("quantity").value, unit = element("unit").value;
    const runs = runsOf(place), line = { color: strokeOf(method), width: 2.2, dash: dashOf(method) };
    const base = { type: "scatter", mode: "lines", showlegend: false, name: method.name };
    // Methods that share a colour are told apart by markers, a few along each curve.
    const marked = method.marker
      ? { mode: "lines+markers", marker: { symbol: method.marker, size: 8, maxdisplayed: 10, color: strokeOf(method) } } : {};
    const isAll = runs.length === state.setting.runs.filter((run) => run.method === place).length;
    // The mean is over all seeds; where one is left out the others are drawn one by one.
    if (element("single").checked || !method.band || !isAll) {
      return runs.map((run) => ({
        ...base, ...marked, x: run[unit], y: run[quantity], line: { ...line, width: runs.length === 1 ? 2.2 : 1.3 },
        hovertemplate: `${method.name}, seed ${run.seed}${runs.length === 1 ? " †" : ""}<br>%{y:.4g} at %{x:.4g}<extra></extra>`,
      }));
    }
    const x = method.band.mean[unit], mean = method.band.mean[quantity], std = method.band.std[quantity];
    const high = mean.map((value, at) => (value === null ? null : value + std[at]));
    const edge = { ...base, x, line: { width: 0 }, hoverinfo: "skip" };
    return [
      { ...edge, y: method.band.low[quantity] },
      { ...edge, y: high, fill: "tonexty", fillcolor: coloured(method.colour, 0.16) },
      { ...base, ...marked, x, y: mean, line, customdata: std,
        hovertemplate: `${method.name}<br>%{y:.4g} ± %{customdata:.2g} at %{x:.4g}<extra></extra>` },
    ];
  }

  function markerOf(method, place) {
    const { cells, marks, isAll } = times().methods[place];
    if (!marks) return [];
    return [{
      type: "scatter", mode: "markers", showlegend: false, y: [threshold()], cliponaxis: false,
      x: [marks[["epoch", "seconds", "cost"].indexOf(element("unit").value)]],
      marker: { size: 11, color: isAll ? strokeOf(method) : colourOf("--paper"), line: { color: strokeOf(method), width: 2 } },
      hovertemplate: `${method.name}: first reached at %{x:.4g} (${cells[0]} seeds)<extra></extra>`,
    }];
  }

  function layout(xTitle, yTitle, yType) {
    const axis = { gridcolor: colourOf("--grid"), zeroline: false, linecolor: colourOf("--line"), automargin: true,
                   tickfont: { size: 12 } };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 54, r: 14, t: 10, b: 46 },
      font: { color: colourOf("--soft"), family: "system-ui, sans-serif", size: 13 }, hovermode: "closest",
      // A finger on the chart should scroll the page, not zoom the chart.
      dragmode: isTouched ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colourOf("--soft"), activecolor: colourOf("--accent") },
      hoverlabel: { bgcolor: colourOf("--panel"), bordercolor: colourOf("--line"), font: { color: colourOf("--ink") } },
      xaxis: { ...axis, title: { text: xTitle } }, yaxis: { ...axis, title: { text: yTitle }, type: yType },
    };
  }

  const options = { displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  const isTouched = matchMedia("(pointer: coarse)").matches;

  function drawCurves() {
    const quantity = element("quantity").value, isLoss = quantity === "train_loss";
    const shown = state.setting.methods.map((method, place) => [method, place]).filter(([, place]) => state.methods.has(place))
      // Controls lie below, so that they never hide what they control.
      .sort(([one], [other]) => Number(other.isDashed) - Number(one.isDashed));
    const traces = shown.flatMap(([method, place]) => tracesOf(method, place));
    const look = layout(names[element("unit").value], names[quantity], element("log").checked ? "log" : "linear");
    if (element("log").checked && spansDecades(traces)) look.yaxis.dtick = "D2";
    if (isLoss) {
      traces.push(...shown.flatMap(([method, place]) => markerOf(method, place)));
      look.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: threshold(), y1: threshold(),
                       line: { color: colourOf("--soft"), width: 1, dash: "dot" } }];
    }
    element("chart").setAttribute("aria-label", `${names[quantity]} against ${names[element("unit").value]}, for the chosen `
      + "optimizers; the table below has the numbers");
    Plotly.react("chart", traces, look, options);
    keepView();
  }

  function spansDecades(traces) {
    const values = finite(traces.flatMap((trace) => trace.y)).filter((value) => value > 0);
    return Math.max(...values) > 10 * Math.min(...values);
  }

  function drawSpectrum() {
    const spectra = state.setting.spectra.filter((one) => one.method === Number(element("watched").value));
    const traces = spectra.flatMap((one) => one.series.map((series) => ({
      type: "scatter", mode: "lines", showlegend: false, x: series.epoch, y: series.value,
      line: { color: coloured(series.isCaptured ? eigenColour(series.index) : "#8b949e"), width: 1.8 },
      hovertemplate: `λ${series.index}, seed ${one.seed}<br>%{y:.4g} at epoch %{x:.4g}<extra></extra>`,
    })));
    const look = layout("epochs", "eigenvalue", "linear");
    const edge = spectra.length ? spectra[0].edge : null;
    if (edge !== null) {
      look.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: edge, y1: edge,
                       line: { color: colourOf("--soft"), width: 1.4, dash: "dash" } }];
      look.annotations = [{ xref: "paper", x: 0, y: edge, text: `edge of stability ${edge.toPrecision(3)}`,
                            showarrow: false, yanchor: "bottom", xanchor: "left" }];
      // Shapes do not stretch an axis, so an invisible point keeps the edge in sight.
      traces.push({ type: "scatter", mode: "markers", x: [0], y: [edge], marker: { opacity: 0 }, showlegend: false, hoverinfo: "skip" });
    }
    Plotly.react("spectrum", traces, look, options);
    keepView();
  }

  const eigenColour = (index) => ["#c2185b", "#be8a1c", "#8b0afc", "#00a856", "#00287b"][(index - 1) % 5];

  function setLevel(level) {
    state.level = level;
    const loss = threshold(), declared = state.setting.levels[state.setting.declared];
    element("slider").value = level;
    element("slider").setAttribute("aria-valuetext", `train loss ${loss}`);
    element("threshold").value = loss;
    element("said").textContent = !state.setting.isDeclared ? "For this task no threshold was declared before the runs."
      : level === state.setting.declared ? `${loss} follows from a rule declared before the runs.`
      : `Not the declared threshold, which is ${declared}.`;
    redraw();
  }

  function redraw() {
    drawCurves();
    drawTimes();
  }

  // The table is known at the slider's stops alone, so a number that is typed in goes to the nearest.
  function nearest(loss) {
    const distances = state.setting.levels.map((level) => Math.abs(Math.log(level / loss)));
    return distances.indexOf(Math.min(...distances));
  }

  function chips(field, entries, chosen) {
    const box = element(field);
    box.querySelectorAll("label").forEach((label) => label.remove());
    entries.forEach(({ value, text, mark }) => {
      const label = document.createElement("label"), input = document.createElement("input");
      input.type = "checkbox";
      input.checked = chosen.has(value);
      input.value = value;
      input.addEventListener("change", () => { chosen[input.checked ? "add" : "delete"](value); redraw(); });
      label.append(input, ...(mark ? [mark] : []), text);
      box.append(label);
    });
  }

  function fill(select, entries, chosen) {
    element(select).replaceChildren(...entries.map(([value, text]) => new Option(text, value, false, value === chosen)));
  }

  function chooseMethods(isOn) {
    state.methods = new Set(state.setting.methods.flatMap((method, place) => (isOn(method) ? [place] : [])));
    chips("methods", state.setting.methods.map((method, value) => ({ value, text: method.name, mark: swatch(method) })), state.methods);
  }

  // What is asked for by name in a link, and otherwise what the page opens with.
  function choose(place, asked = new URLSearchParams()) {
    state.setting = data.settings[place];
    const seeds = [...new Set(state.setting.runs.map((run) => run.seed))].sort((a, b) => a - b);
    const named = (name, otherwise) => {
      const found = state.setting.methods.findIndex((method) => method.label === asked.get(name));
      return found < 0 ? otherwise : found;
    };
    state.seeds = new Set(asked.has("seed") ? asked.getAll("seed").map(Number) : seeds);
    chooseMethods((method) => (asked.has("method") ? asked.getAll("method").includes(method.label) : method.isOn));
    chips("seeds", seeds.map((value) => ({ value, text: String(value) })), state.seeds);
    fill("baseline", state.setting.methods.map((method, at) => [at, method.name]), named("speedup", state.setting.baseline));
    const watched = [...new Set(state.setting.spectra.map((one) => one.method))].sort((a, b) => a - b);
    const curved = watched.find((at) => state.setting.spectra.some((one) => one.method === at && one.series.some((s) => s.isCaptured)));
    fill("watched", watched.map((at) => [at, state.setting.methods[at].name]), named("watched", curved));
    element("curvature").hidden = !watched.length;
    element("slider").max = state.setting.levels.length - 1;
    setLevel(Number(asked.get("threshold")) > 0 ? nearest(Number(asked.get("threshold"))) : state.setting.declared);
    if (watched.length) drawSpectrum();
  }

  const taskOf = (setting) => `${setting.suite}/${setting.task}`;

  // The address always names what is shown, so that it can be sent to somebody.
  function keepView() {
    const { setting } = state, label = (id) => setting.methods[Number(element(id).value)]?.label ?? "";
    const chosen = new URLSearchParams({ task: taskOf(setting), threshold: threshold(), speedup: label("baseline") });
    ["quantity", "unit"].forEach((id) => chosen.set(id, element(id).value));
    ["log", "single"].forEach((id) => chosen.set(id, Number(element(id).checked)));
    if (setting.spectra.length) chosen.set("watched", label("watched"));
    [...state.methods].forEach((place) => chosen.append("method", setting.methods[place].label));
    if (!state.methods.size) chosen.set("method", "");
    [...state.seeds].forEach((seed) => chosen.append("seed", seed));
    element("link").href = `#${chosen}`;
    // Not at every stop of a slider under way: browsers allow so many changes of the address and no more.
    clearTimeout(state.keeping);
    state.keeping = setTimeout(() => history.replaceState(null, "", element("link").hash), 200);
  }

  function restoreView(view) {
    const asked = new URLSearchParams(view.slice(1));
    const place = data.settings.findIndex((setting) => taskOf(setting) === asked.get("task"));
    if (place < 0) return false;
    element("setting").value = place;
    ["quantity", "unit"].forEach((id) => { if (element(id).querySelector(`[value="${CSS.escape(asked.get(id))}"]`)) element(id).value = asked.get(id); });
    ["log", "single"].forEach((id) => { if (asked.has(id)) element(id).checked = asked.get(id) === "1"; });
    choose(place, asked);
    return true;
  }

  // What a link leads to may be folded, or within something that is.
  function reveal(hash) {
    const target = hash.length > 1 && document.getElementById(decodeURIComponent(hash.slice(1)));
    if (!target) return;
    for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
    target.scrollIntoView();
  }

  function start() {
    reveal(location.hash);
    if (!data.settings.length) { element("curves").hidden = element("curvature").hidden = true; return; }
    fill("setting", data.settings.map((one, at) => [at, one.title]), 0);
    element("setting").addEventListener("change", (event) => choose(Number(event.target.value)));
    ["quantity", "unit", "log", "single"].forEach((id) => element(id).addEventListener("change", drawCurves));
    element("baseline").addEventListener("change", drawTimes);
    element("watched").addEventListener("change", drawSpectrum);
    element("slider").addEventListener("input", (event) => setLevel(Number(event.target.value)));
    element("threshold").addEventListener("change", (event) => { if (Number(event.target.value) > 0) setLevel(nearest(Number(event.target.value))); });
    element("declared").addEventListener("click", () => setLevel(state.setting.declared));
    element("all").addEventListener("click", () => { chooseMethods(() => true); redraw(); });
    element("none").addEventListener("click", () => { chooseMethods(() => false); redraw(); });
    // Paper cannot be clicked: everything that is folded is printed, and folded again afterwards.
    addEventListener("beforeprint", () => document.querySelectorAll("details:not([open])").forEach((one) => { one.open = true; one.dataset.printed = ""; }));
    addEventListener("afterprint", () => document.querySelectorAll("details[data-printed]").forEach((one) => { one.open = false; delete one.dataset.printed; }));
    darkness.addEventListener("change", () => restoreView(element("link").hash));
    addEventListener("hashchange", () => { reveal(location.hash); restoreView(location.hash); });
    const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => { if (target.data) Plotly.Plots.resize(target); }));
    ["chart", "spectrum"].forEach((id) => resized.observe(element(id)));
    restoreView(location.hash) || choose(0);
  }

  start();
})();
