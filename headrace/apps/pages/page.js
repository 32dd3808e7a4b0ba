"use strict";
// Looking closer: hover, and zoom of the lanes. Without this script the page still shows everything.
const look = (signal) => {
  document.getElementById("tip")?.remove();
  const tip = document.createElement("div");
  tip.id = "tip";
  document.body.append(tip);
  const say = (text, event) => {
    tip.textContent = text;
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4)) + "px";
    tip.style.top = Math.max(4, event.clientY - box.height - 12) + "px";
  };
  const hush = () => { tip.style.display = "none"; };
  const figure = (value) => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en").replace(/,/g, "\u2009")
    : String(Number(value.toPrecision(4)));

  const roundTicks = (low, high, count) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
    const found = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high * (1 + 1e-9); index++) found.push(index * step);
    return found;
  };

  const lanes = document.getElementById("lanes");
  if (lanes) {
    const body = lanes.querySelector(".lanes-body"), axis = document.getElementById("lanes-axis");
    const tracks = [...lanes.querySelectorAll("svg.track")], grid = lanes.querySelector(".grid:not(.ends)");
    const span = Number(lanes.dataset.span);
    let from = 0, to = span;
    const place = (at) => 100 * (at - from) / (to - from) + "%";
    const words = (at) => to - from >= 2000 ? figure(at / 1000) + " s" : figure(at) + " ms";
    const show = (low, high) => {
      const width = Math.min(span, Math.max(high - low, span / 2000));
      from = Math.max(0, Math.min(low, span - width));
      to = from + width;
      for (const track of tracks) track.setAttribute("viewBox", `${from} 0 ${width} ${track.viewBox.baseVal.height}`);
      grid.replaceChildren();
      axis.replaceChildren();
      for (const at of roundTicks(from, to, innerWidth < 640 ? 4 : 8)) {
        const line = document.createElement("i"), label = document.createElement("span");
        line.style.left = label.style.left = place(at);
        label.textContent = words(at);
        grid.append(line);
        axis.append(label);
      }
      for (const end of lanes.querySelectorAll(".ends")) end.firstElementChild.style.left = place(Number(end.dataset.at));
      lanes.dataset.from = from;
      lanes.dataset.to = to;
    };
    const moves = {
      in: () => show(from + (to - from) / 4, to - (to - from) / 4),
      out: () => show(from - (to - from) / 2, to + (to - from) / 2),
      left: () => show(from - (to - from) / 3, to - (to - from) / 3),
      right: () => show(from + (to - from) / 3, to + (to - from) / 3),
      all: () => show(0, span),
    };
    const tools = document.querySelector(".tools");
    tools.hidden = false;
    for (const button of tools.querySelectorAll("button")) button.addEventListener("click", moves[button.dataset.zoom]);
    // The script's own tip is quicker than the browser's and can be styled; both at once would be one too many.
    for (const mark of lanes.querySelectorAll("rect > title")) {
      mark.parentNode.dataset.words = mark.textContent;
      mark.remove();
    }
    let anchor = null, selection = null;
    const at = (event) => {
      const box = tracks[0].getBoundingClientRect();
      return from + (to - from) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    };
    body.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) { anchor = at(event); event.preventDefault(); }
    });
    body.addEventListener("pointermove", (event) => {
      if (anchor === null) {
        const words = event.target.dataset && event.target.dataset.words;
        return words ? say(words, event) : hush();
      }
      if (!selection) { selection = document.createElement("div"); selection.className = "selection"; grid.append(selection); }
      const [low, high] = [anchor, at(event)].sort((one, other) => one - other);
      selection.style.left = place(low);
      selection.style.width = 100 * (high - low) / (to - from) + "%";
    });
    addEventListener("pointerup", (event) => {
      if (anchor !== null && selection) {
        const [low, high] = [anchor, at(event)].sort((one, other) => one - other);
        selection.remove();
        if (high - low > (to - from) / 200) show(low, high);
      }
      anchor = selection = null;
    }, { signal });
    body.addEventListener("pointerdown", (event) => {
      const words = event.target.dataset && event.target.dataset.words;
      if (event.pointerType !== "mouse" && words) say(words, event);
    });
    body.addEventListener("pointerleave", hush);
    body.addEventListener("dblclick", moves.all);
    show(0, span);
  }

  const block = document.getElementById("steps-data");
  if (block) {
    const data = JSON.parse(block.textContent), width = Math.max(1, data.last - data.first);
    const plots = [...document.querySelectorAll(".plot")];
    const nearest = (points, step) => points.reduce((best, point) =>
      Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
    for (const plot of plots) {
      plot.addEventListener("pointermove", (event) => {
        const box = plot.getBoundingClientRect();
        const wanted = data.first + width * (event.clientX - box.left) / box.width;
        const series = data.series[plot.dataset.series], [step, value] = nearest(series.points, wanted);
        for (const other of plots) {
          const cross = other.querySelector(".cross");
          cross.style.display = "block";
          cross.style.left = (data.last > data.first ? 100 * (step - data.first) / width : 50) + "%";
        }
        const skipped = data.skipped[step];
        say(`step ${step}: ${figure(value)}${series.unit}` + (skipped ? `\nskipped: ${skipped}` : ""), event);
      });
      plot.addEventListener("pointerleave", () => {
        hush();
        for (const cross of document.querySelectorAll(".cross")) cross.style.display = "none";
      });
    }
  }
};
let looking = new AbortController();
look(looking.signal);
const lookAgain = () => {
  looking.abort();
  looking = new AbortController();
  look(looking.signal);
};
