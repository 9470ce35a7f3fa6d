"use strict";
// The slider chooses a moment on the chosen axis; of each run and prompt the last picture until then is shown.
(() => {
  const slider = document.getElementById("moment");
  if (!slider) return;
  const said = document.getElementById("moment-said");
  const sets = [...document.querySelectorAll("[data-pictures]")].map((set) => [...set.querySelectorAll("figure")]);
  const axis = () => document.querySelector("input[name=axis]:checked").value;
  const place = (figure) => Number(figure.dataset[axis()]);
  let moments = [];

  function show() {
    const now = moments[slider.value];
    const value = axis() === "hours" ? now.toFixed(now < 1 ? 3 : 1) : Math.round(now).toLocaleString("en");
    said.textContent = `${value} ${axis()}`;
    slider.setAttribute("aria-valuetext", said.textContent);
    for (const set of sets) {
      const until = set.filter((figure) => place(figure) <= now);
      const shown = until.length ? until[until.length - 1] : set[0];
      for (const figure of set) figure.hidden = figure !== shown;
    }
  }

  function begin(atEnd) {
    const share = atEnd || moments.length < 2 ? 1 : slider.value / (moments.length - 1);
    moments = [...new Set(sets.flat().map(place))].sort((a, b) => a - b);
    slider.max = moments.length - 1;
    slider.value = Math.round(share * slider.max);
    show();
  }

  slider.addEventListener("input", show);
  for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", () => begin(false));
  document.getElementById("slider").hidden = false;
  begin(true);
})();
