// What the scripts of the pictures share. Each gets these helpers and returns what draws its picture from
// the numbers of its sliders. That is done at once, and again whenever a control has moved.
function picture(name, script) {
  const figure = document.getElementById(`pic-${name}`);
  const all = (selector) => [...figure.querySelectorAll(selector)];
  const one = (selector) => figure.querySelector(selector);
  const set = (part, attributes) => {
    for (const key in attributes) part.setAttribute(key, attributes[key]);
  };
  const say = (selector, ...words) => words.forEach((text, i) => (all(selector)[i].textContent = text));
  const minus = (x) => `${x}`.replace("-", "−");
  // The same normal numbers for the same seed.
  const gaussian = (seed) => {
    const uniform = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
    return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
  };
  const draw = script({ figure, all, one, set, say, minus, gaussian });
  figure.oninput = () => draw(...all("[type=range]").map((slider) => slider.valueAsNumber));
  figure.oninput();
  one(".controls").hidden = false;
}
