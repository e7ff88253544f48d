"use strict";
// Shows the charts' values under the pointer, and hides lines on request. The page works without this script.
(() => {
  const readout = JSON.parse(document.getElementById("readout").textContent);
  const charts = [...document.querySelectorAll("[data-chart]")];
  const now = document.querySelector(".now");
  const hint = now && now.textContent;

  const clock = (s) => {
    if (s < 60) return `${s.toFixed(1)} s`;
    const m = Math.floor(s / 60), two = (n) => String(n).padStart(2, "0");
    if (m < 60) return `${m} min ${two(Math.floor(s % 60))} s`;
    const h = Math.floor(m / 60);
    return h < 24 ? `${h} h ${two(m % 60)} min` : `${Math.floor(h / 24)} d ${two(h % 24)} h ${two(m % 60)} min`;
  };
  const nearest = (at) => {
    let low = 0, high = readout.places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (readout.places[middle] < at) low = middle; else high = middle;
    }
    return at - readout.places[low] < readout.places[high] - at ? low : high;
  };
  const show = (index) => {
    const at = index === null ? null : readout.places[index];
    for (const chart of charts) {
      const cursor = chart.querySelector(".cursor");
      cursor.hidden = at === null;
      if (at !== null) cursor.style.left = `${100 * at / readout.length_s}%`;
      chart.querySelectorAll("output").forEach((output, number) => {
        const value = at === null ? null : readout.charts[chart.dataset.chart][number][index];
        output.textContent = value === null ? "" : value.toLocaleString("en");
      });
    }
    now.textContent = at === null ? hint : `After ${clock(at)}`;
  };
  for (const chart of charts) {
    const plot = chart.querySelector(".plot");
    const read = (event) => {
      const box = plot.getBoundingClientRect();
      show(nearest((event.clientX - box.left) / box.width * readout.length_s));
    };
    plot.addEventListener("pointerdown", read);
    plot.addEventListener("pointermove", read);
    // A lifted finger also counts as leaving. The values stay.
    plot.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") show(null); });
    for (const button of chart.querySelectorAll("button")) {
      button.addEventListener("click", () => {
        const visible = button.getAttribute("aria-pressed") === "true";
        button.setAttribute("aria-pressed", String(!visible));
        chart.querySelector(`g[data-stroke="${button.dataset.stroke}"]`).classList.toggle("hidden", visible);
      });
    }
  }
})();
