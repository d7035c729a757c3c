"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const names = {
    train_loss: "train loss", train_accuracy: "train accuracy", test_loss: "test loss", test_accuracy: "test accuracy",
    epoch: "epochs", seconds: "seconds of training", cost: "gradient evaluations",
  };
  const state = { setting: null, threshold: 0, methods: new Set(), seeds: new Set() };

  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const deviation = (values) => {
    const center = mean(values);
    return Math.sqrt(values.reduce((sum, value) => sum + (value - center) ** 2, 0) / (values.length - 1));
  };
  const runsOf = (method) =>
    state.setting.runs.filter((run) => run.method === method && state.seeds.has(run.seed));
  const finite = (values) => values.filter((value) => value !== null && Number.isFinite(value));

  // The same definitions as first_epoch_below and ratio_interval in analysis.py.
  function firstHit(run, threshold) {
    const place = run.train_loss.findIndex((loss) => loss !== null && loss <= threshold);
    if (place < 0) return null;
    const before = place > 0 ? run.train_loss[place - 1] : null;
    const excess = before === null ? 0 : (threshold - run.train_loss[place]) / (before - run.train_loss[place]);
    const at = run.seen ?? run; // A full batch shows its loss before the step.
    const crossing = (unit) => at[unit][place] - (place > 0 ? excess * (at[unit][place] - at[unit][place - 1]) : 0);
    return {
      epoch: at.epoch[place], seconds: at.seconds[place], cost: at.cost[place],
      crossing: { epoch: run.hasEpochs ? crossing("epoch") : NaN, seconds: crossing("seconds") },
    };
  }

  function hitsOf(method) {
    return runsOf(method).filter((run) => run.hasEnded)
      .map((run) => ({ seed: run.seed, hit: firstHit(run, state.threshold) }));
  }

  function speedup(reference, own, unit) {
    const logs = finite(own.flatMap(({ seed, hit }) => {
      const other = reference.find((entry) => entry.seed === seed);
      return hit && other && other.hit ? [Math.log(other.hit.crossing[unit] / hit.crossing[unit])] : [];
    }));
    if (!logs.length) return "–";
    const center = Math.exp(mean(logs)).toFixed(2);
    const quantile = data.quantiles[logs.length - 2];
    if (logs.length < 2 || quantile === undefined) return `${center}×†`;
    const reach = quantile * deviation(logs) / Math.sqrt(logs.length);
    return `${center}× [${Math.exp(mean(logs) - reach).toFixed(2)}, ${Math.exp(mean(logs) + reach).toFixed(2)}]`;
  }

  function spread(values, digits) {
    if (!values.length) return "–";
    if (values.length === 1) return `${values[0].toFixed(digits)}†`;
    return `${mean(values).toFixed(digits)} ± ${deviation(values).toFixed(digits)}`;
  }

  function drawTimes() {
    const body = element("times").tBodies[0];
    const labels = [...element("times").tHead.rows[0].cells].map((cell) => cell.textContent);
    const reference = hitsOf(Number(element("baseline").value));
    body.replaceChildren();
    state.setting.methods.forEach((method, place) => {
      if (!state.methods.has(place)) return;
      const hits = hitsOf(place);
      const reached = hits.filter(({ hit }) => hit).map(({ hit }) => hit);
      const column = (unit, digits) => spread(reached.map((hit) => hit[unit]), digits);
      const row = body.insertRow();
      const texts = [
        method.name, `${reached.length} of ${hits.length}`, reached.length ? column("epoch", 2) : "not reached",
        column("seconds", 1), column("cost", 0), speedup(reference, hits, "epoch"), speedup(reference, hits, "seconds"),
      ];
      texts.forEach((text, index) => {
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
    mark.className = method.isDashed ? "swatch dashed" : "swatch";
    mark.style.borderColor = method.colour;
    return mark;
  }

  const rgba = (hex, alpha) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;

  // The mean ends with the first seed that ends: beyond it the mean would change its seeds, and jump.
  function meanCurve(runs, quantity, unit) {
    const length = Math.min(...runs.map((run) => run.epoch.length));
    const curve = { x: [], y: [], low: [], high: [] };
    for (let place = 0; place < length; place++) {
      const values = finite(runs.map((run) => run[quantity][place]));
      if (values.length < runs.length) continue;
      const center = mean(values), width = values.length > 1 ? deviation(values) : 0;
      curve.x.push(mean(runs.map((run) => run[unit][place])));
      curve.y.push(center);
      curve.low.push(center - width);
      curve.high.push(center + width);
    }
    return curve;
  }

  function tracesOf(method, place) {
    const quantity = element("quantity").value, unit = element("unit").value;
    const runs = runsOf(place), line = { color: method.colour, width: 2.2, dash: method.isDashed ? "dash" : "solid" };
    const base = { type: "scatter", mode: "lines", showlegend: false, name: method.name };
    if (!runs.length) return [];
    const single = element("single").checked || runs.length === 1;
    if (single) {
      return runs.map((run) => ({
        ...base, x: run[unit], y: run[quantity], line: { ...line, width: runs.length === 1 ? 2.2 : 1.3 },
        hovertemplate: `${method.name}, seed ${run.seed}${runs.length === 1 ? " †" : ""}<br>%{y:.4g} at %{x:.4g}<extra></extra>`,
      }));
    }
    const curve = meanCurve(runs, quantity, unit);
    const edge = { ...base, x: curve.x, line: { width: 0 }, hoverinfo: "skip" };
    return [
      { ...edge, y: curve.low },
      { ...edge, y: curve.high, fill: "tonexty", fillcolor: rgba(method.colour, 0.16) },
      { ...base, x: curve.x, y: curve.y, line, customdata: curve.y.map((value, at) => curve.high[at] - value),
        hovertemplate: `${method.name}<br>%{y:.4g} ± %{customdata:.2g} at %{x:.4g}<extra></extra>` },
    ];
  }

  function markerOf(method, place) {
    const unit = element("unit").value, hits = hitsOf(place);
    const reached = hits.filter(({ hit }) => hit).map(({ hit }) => hit[unit]);
    if (!reached.length) return [];
    return [{
      type: "scatter", mode: "markers", showlegend: false, x: [mean(reached)], y: [state.threshold], cliponaxis: false,
      marker: { size: 11, color: reached.length === hits.length ? method.colour : colourOf("--paper"),
                line: { color: method.colour, width: 2 } },
      hovertemplate: `${method.name}: first reached at %{x:.4g} (${reached.length} of ${hits.length} seeds)<extra></extra>`,
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

  const options = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  const isTouched = matchMedia("(pointer: coarse)").matches;

  function drawCurves() {
    const quantity = element("quantity").value, isLoss = quantity === "train_loss";
    const shown = state.setting.methods.map((method, place) => [method, place]).filter(([, place]) => state.methods.has(place))
      // Controls lie below, so that they never hide what they control.
      .sort(([one], [other]) => Number(other.isDashed) - Number(one.isDashed));
    const traces = shown.flatMap(([method, place]) => tracesOf(method, place));
    const look = layout(names[element("unit").value], names[quantity], element("log").checked ? "log" : "linear");
    if (element("log").checked) look.yaxis.dtick = spansDecades(traces) ? "D2" : "D1";
    if (isLoss) {
      traces.push(...shown.flatMap(([method, place]) => markerOf(method, place)));
      look.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: state.threshold, y1: state.threshold,
                       line: { color: colourOf("--soft"), width: 1, dash: "dot" } }];
    }
    Plotly.react("chart", traces, look, options);
  }

  function spansDecades(traces) {
    const values = finite(traces.flatMap((trace) => trace.y)).filter((value) => value > 0);
    return Math.max(...values) > 10 * Math.min(...values);
  }

  function drawSpectrum() {
    const spectra = state.setting.spectra.filter((one) => one.method === Number(element("watched").value));
    const traces = spectra.flatMap((one) => one.series.map((series) => ({
      type: "scatter", mode: "lines", showlegend: false, x: series.epoch, y: series.value,
      line: { color: series.isCaptured ? eigenColour(series.index) : "#8b949e", width: 1.8 },
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
  }

  const eigenColour = (index) => ["#c2185b", "#e07a1f", "#8e44ad", "#2e8b57", "#1f77b4"][(index - 1) % 5];

  function bounds() {
    // A run that diverges can reach any height, and would leave the slider no room for the others.
    const runs = state.setting.runs.filter((run) => run.status !== "diverged");
    const losses = finite((runs.length ? runs : state.setting.runs).flatMap((run) => run.train_loss)).filter((loss) => loss > 0);
    return [Math.min(...losses, state.setting.threshold), Math.max(...losses, state.setting.threshold)];
  }

  // The slider is logarithmic, and falls to the right: further is harder.
  const lossAt = (place) => { const [low, high] = bounds(); return Number((high * (low / high) ** (place / 1000)).toPrecision(4)); };
  const placeOf = (loss) => { const [low, high] = bounds(); return high > low ? 1000 * Math.log(high / loss) / Math.log(high / low) : 0; };

  function setThreshold(loss) {
    state.threshold = loss;
    element("slider").value = placeOf(loss);
    element("slider").setAttribute("aria-valuetext", `train loss ${loss}`);
    element("threshold").value = loss;
    const isDeclared = loss === state.setting.threshold && state.setting.isDeclared;
    element("said").textContent = isDeclared ? `${loss} follows from a rule declared before the runs.`
      : state.setting.isDeclared ? `Not the declared threshold, which is ${state.setting.threshold}.`
      : "For this task no threshold was declared before the runs.";
    drawCurves();
    drawTimes();
  }

  function chips(field, entries, chosen) {
    const box = element(field);
    box.querySelectorAll("label").forEach((label) => label.remove());
    entries.forEach(({ value, text, mark }) => {
      const label = document.createElement("label"), input = document.createElement("input");
      input.type = "checkbox";
      input.checked = chosen.has(value);
      input.value = value;
      input.addEventListener("change", () => { chosen[input.checked ? "add" : "delete"](value); drawCurves(); drawTimes(); });
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

  function choose(place) {
    state.setting = data.settings[place];
    const seeds = [...new Set(state.setting.runs.map((run) => run.seed))].sort((a, b) => a - b);
    state.seeds = new Set(seeds);
    chooseMethods((method) => method.isOn);
    chips("seeds", seeds.map((value) => ({ value, text: String(value) })), state.seeds);
    fill("baseline", state.setting.methods.map((method, at) => [at, method.name]), state.setting.baseline);
    const watched = [...new Set(state.setting.spectra.map((one) => one.method))].sort((a, b) => a - b);
    const curved = watched.find((at) => state.setting.spectra.some((one) => one.method === at && one.series.some((s) => s.isCaptured)));
    fill("watched", watched.map((at) => [at, state.setting.methods[at].name]), curved);
    element("curvature").hidden = !watched.length;
    setThreshold(state.setting.threshold);
    if (watched.length) drawSpectrum();
  }

  function start() {
    if (!data.settings.length) { element("curves").hidden = element("curvature").hidden = true; return; }
    fill("setting", data.settings.map((one, at) => [at, `${one.suite} · ${one.task}`]), 0);
    element("setting").addEventListener("change", (event) => choose(Number(event.target.value)));
    ["quantity", "unit", "log", "single"].forEach((id) => element(id).addEventListener("change", drawCurves));
    element("baseline").addEventListener("change", drawTimes);
    element("watched").addEventListener("change", drawSpectrum);
    element("slider").addEventListener("input", (event) => setThreshold(lossAt(Number(event.target.value))));
    element("threshold").addEventListener("change", (event) => { if (Number(event.target.value) > 0) setThreshold(Number(event.target.value)); });
    element("declared").addEventListener("click", () => setThreshold(state.setting.threshold));
    const redraw = () => { drawCurves(); drawTimes(); };
    element("all").addEventListener("click", () => { chooseMethods(() => true); redraw(); });
    element("none").addEventListener("click", () => { chooseMethods(() => false); redraw(); });
    // Paper cannot be clicked: everything that is folded is printed, and folded again afterwards.
    addEventListener("beforeprint", () => document.querySelectorAll("details:not([open])").forEach((one) => { one.open = true; one.dataset.printed = ""; }));
    addEventListener("afterprint", () => document.querySelectorAll("details[data-printed]").forEach((one) => { one.open = false; delete one.dataset.printed; }));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => choose(Number(element("setting").value)));
    choose(0);
  }

  start();
})();
