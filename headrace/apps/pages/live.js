"use strict";
// The page of a run under way: it asks for news, and puts them in the place of what it shows.
(() => {
  const note = document.getElementById("live");
  let stamp = document.body.dataset.stamp, came = Date.now(), silent = false;
  const parts = ["header", "main"];
  const words = () => {
    if (silent) return "headrace watch has ended; this is the last that it said.";
    if (document.body.dataset.finished) return "The run is finished.";
    const seconds = Math.round((Date.now() - came) / 1000);
    return `Live; last news ${seconds < 120 ? seconds + " s" : Math.round(seconds / 60) + " min"} ago.`;
  };
  const take = (text) => {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    const open = [...document.querySelectorAll("details")].map((each) => each.open);
    for (const part of parts) document.querySelector(part).replaceWith(document.adoptNode(fresh.querySelector(part)));
    document.querySelectorAll("details").forEach((each, index) => { each.open = Boolean(open[index]); });
    for (const [key, value] of Object.entries(fresh.body.dataset)) document.body.dataset[key] = value;
    stamp = fresh.body.dataset.stamp;
    came = Date.now();
    lookAgain();
  };
  const ask = async () => {
    try {
      const answer = await fetch("/?seen=" + stamp, { cache: "no-store" });
      if (answer.status === 200) take(await answer.text());
      silent = false;
    } catch {
      silent = true;
    }
    note.textContent = words();
    setTimeout(ask, 2000);
  };
  note.textContent = words();
  setTimeout(ask, 2000);
})();
