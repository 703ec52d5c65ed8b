"use strict";

const root = document.body.dataset.root;
const byId = (id) => document.getElementById(id);

function seconds(value) {
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
  const [scale, unit] = units.find(([scale]) => value >= scale) || units[3];
  const scaled = value / scale;
  return `${scaled < 1000 ? scaled.toPrecision(3) : scaled.toFixed(0)} ${unit}`;
}

function percent(value) {
  return `${(100 * value).toFixed(1)} %`;
}

function gigabytes(value) {
  return `${(value / 1e9).toFixed(1)} GB`;
}

// A pipeline rank under the pointer dims all others, in every picture.
function ranksOf(element) {
  return element.dataset.ranks.split(" ");
}

function showOnly(chosen) {
  for (const element of document.querySelectorAll("[data-ranks]")) {
    const isChosen = !chosen || ranksOf(element).some((rank) => chosen.includes(rank));
    element.classList.toggle("dim", !isChosen);
  }
}

document.addEventListener("pointerover", (event) => {
  const element = event.target.closest("[data-ranks]");
  showOnly(element && ranksOf(element));
});

// The timeline becomes part of the page, so that it has the page's colours.
function prepareTimeline(place) {
  const zoom = byId("zoom");
  const first = byId("first");
  const scale = () => {
    const picture = place.querySelector("svg");
    picture?.setAttribute("width", picture.viewBox.baseVal.width * zoom.value);
  };
  const show = async () => {
    const query = first.value === "" ? "" : `?first_micro_batch=${first.value}`;
    const response = await fetch(place.dataset.source + query);
    place.replaceChildren(pictureOf(await response.text(), response.ok));
    scale();
  };
  zoom.addEventListener("input", scale);
  first.addEventListener("change", show);
  show();
}

function pictureOf(text, isPicture) {
  if (!isPicture) return document.createTextNode(problemText(JSON.parse(text)));
  const picture = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  picture.querySelectorAll("style").forEach((style) => style.remove());
  return document.adoptNode(picture);
}

// A search in progress: figures and curves follow its events.
function followJob(job) {
  const points = [];
  const events = new EventSource(job.dataset.events);
  const update = (event) => showProgress(JSON.parse(event.data), points);
  events.addEventListener("incumbent", update);
  events.addEventListener("progress", update);
  events.addEventListener("done", () => {
    events.close();
    location.reload();
  });
}

function showProgress(state, points) {
  const best = state.incumbent_seconds;
  const bound = state.lower_bound_seconds;
  byId("best").textContent = best === null ? "none yet" : seconds(best);
  byId("bound").textContent = bound === null ? "none yet" : seconds(bound);
  byId("gap").textContent = state.gap === null ? "unknown" : percent(state.gap);
  byId("layouts").textContent = `${state.layouts_done} of ${state.layouts_considered}`;
  byId("progress").max = Math.max(1, state.layouts_considered);
  byId("progress").value = state.layouts_done;
  points.push({ time: state.elapsed_seconds, best, bound });
  drawCurve("best-curve", points, "best");
  drawCurve("bound-curve", points, "bound");
}

function drawCurve(id, points, name) {
  const last = Math.max(points[points.length - 1].time, 1e-9);
  const most = Math.max(...points.map((each) => Math.max(each.best || 0, each.bound || 0)));
  const known = points.filter((each) => each[name] !== null);
  const place = (each) => [
    (600 * each.time) / last,
    115 - (110 * each[name]) / (most || 1),
  ];
  byId(id).setAttribute("points", known.map((each) => place(each).join(",")).join(" "));
}

// What if: sliders change the plan's layout, and the service predicts it.
function prepareWhatIf(section) {
  section.hidden = false;
  let timer = 0;
  let latest = 0;
  for (const slider of section.querySelectorAll("input")) {
    slider.addEventListener("input", () => {
      showValue(slider);
      clearTimeout(timer);
      timer = setTimeout(() => predict(section, ++latest, () => latest), 250);
    });
  }
}

function valueOf(slider) {
  return Number(slider.dataset.values.split(" ")[slider.value]);
}

function showValue(slider) {
  document.querySelector(`output[for="${slider.id}"]`).textContent = valueOf(slider);
  slider.setAttribute("aria-valuetext", String(valueOf(slider)));
}

function layoutOf(section) {
  const layout = JSON.parse(section.dataset.request).layout;
  for (const slider of section.querySelectorAll("input")) {
    layout[slider.id] = valueOf(slider);
  }
  const others = ["tensor_parallel_degree", "pipeline_parallel_degree"];
  others.push("context_parallel_degree");
  const ranks = others.reduce((product, name) => product * layout[name], 1);
  layout.data_parallel_degree = Math.max(1, Math.floor(section.dataset.devices / ranks));
  delete layout.micro_batch_shares;
  if (!layout.zero_stage) delete layout.zero_shard_degree;
  if (layout.pipeline_parallel_degree === 1) {
    Object.assign(layout, { schedule: "1f1b", virtual_stages_per_rank: 1 });
  }
  return layout;
}

async function predict(section, number, latest) {
  const layout = layoutOf(section);
  const response = await fetch(`${root}/v1/predictions`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...JSON.parse(section.dataset.request), layout }),
  });
  const answer = await response.json();
  if (number !== latest()) return;
  const text = response.ok ? forecastText(answer, section) : problemText(answer);
  byId("answer").textContent = `Data ${layout.data_parallel_degree}: ${text}`;
}

function forecastText(forecast, section) {
  const { step_seconds: step, memory } = forecast.prediction;
  const change = step / Number(section.dataset.step) - 1;
  const sign = change < 0 ? "" : "+";
  const fullest = memory.reduce((one, two) => (two.peak_bytes > one.peak_bytes ? two : one));
  const fits = forecast.fits ? "fits" : "does not fit";
  return (
    `${seconds(step)} per step (${sign}${percent(change)}), ` +
    `${gigabytes(fullest.peak_bytes)} of ${gigabytes(fullest.capacity_bytes)}: ${fits}.`
  );
}

function problemText(problem) {
  const [first] = problem.errors || [];
  return first ? `${first.message} ${first.hint}` : problem.detail;
}

// Copy puts the plan for its runtime on the clipboard.
async function copy(button) {
  const response = await fetch(button.dataset.copy);
  const text = await response.text();
  try {
    await navigator.clipboard.writeText(text);
    byId("copied").textContent = "Copied.";
  } catch {
    location.assign(button.dataset.copy);
  }
}

document.querySelectorAll("[data-copy]").forEach((button) => {
  button.addEventListener("click", () => copy(button));
});
if (byId("timeline")) prepareTimeline(byId("timeline"));
if (byId("job")?.dataset.events) followJob(byId("job"));
if (byId("what-if")) prepareWhatIf(byId("what-if"));
