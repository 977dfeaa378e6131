// The page "Claims and verdicts": show the claims that are asked for, keep the question in the
// address, and open the claim that an address names. The list is complete without this script.
// It runs while the page is read, before formulas are typeset, so that their TeX can be searched.

const form = document.getElementById("claims-filter");
const menus = [...form.querySelectorAll("select")];
const plain = (text) => text.toLowerCase().replace(/[\\{}$]/g, "").replace(/\s+/g, " ");
const claims = [...document.querySelectorAll("details.claim")];
const texts = claims.map((claim) => plain(claim.textContent));

// What a menu asks for, as the head of the entry says it: "measured, 6 of 6 seeds" is measured.
const facts = claims.map((claim) => {
  const said = (part) => claim.querySelector(`.claim-${part}`).textContent.replaceAll(" ", "-");
  const [verdict, grade = ""] = said("badge").split("-·-");
  const paper = claim.id.split("-")[1];
  return { paper, kind: said("kind"), verdict, grade: grade.split(",")[0] };
});

function choose() {
  const words = plain(form.elements.text.value).split(" ");
  const fits = (_, k) =>
    menus.every((menu) => !menu.value || facts[k][menu.name] === menu.value) &&
    words.every((word) => texts[k].includes(word));
  const shown = claims.filter(fits);
  for (const claim of claims) claim.hidden = claim.closest("section").hidden = true;
  for (const claim of shown) claim.hidden = claim.closest("section").hidden = false;
  form.querySelector("output").textContent = `${shown.length} of ${claims.length} claims`;
}

// The address: what is asked for in its query, an open claim behind its #.
function remember(hash) {
  const asked = [...new FormData(form)].filter(([, value]) => value);
  const query = asked.length ? `?${new URLSearchParams(asked)}` : "";
  history.replaceState(history.state, "", location.pathname + query + hash);
}

function restore() {
  const asked = new URLSearchParams(location.search);
  form.elements.text.value = asked.get("text") ?? "";
  for (const menu of menus) {
    menu.value = asked.get(menu.name) ?? "";
    menu.selectedIndex = Math.max(menu.selectedIndex, 0); // a value that the menu does not have
  }
}

function reveal() {
  const claim = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!claim?.matches("details.claim")) return;
  if (claim.hidden) {
    form.reset();
    choose();
    remember(location.hash);
  }
  claim.open = true;
  claim.scrollIntoView();
}

form.addEventListener("input", () => {
  choose();
  remember(location.hash);
});
form.addEventListener("submit", (event) => event.preventDefault());
for (const claim of claims)
  claim.addEventListener("toggle", () => {
    if (claim.open) remember(`#${claim.id}`);
    else if (location.hash === `#${claim.id}`) remember("");
  });
addEventListener("hashchange", reveal);
addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#claim-"]');
  if (link?.getAttribute("href") === location.hash) setTimeout(reveal); // it is no change
});
addEventListener("load", async () => {
  await window.MathJax?.startup?.promise; // formulas move what stands below them
  reveal();
});

// The picture opens on its first box, the highest of the leftmost, not on the room above it.
function showFirst() {
  const [picture, ...boxes] = document.querySelectorAll(".graph, .graph rect");
  const [first] = boxes
    .map((box) => box.getBoundingClientRect())
    .sort((a, b) => Math.round(a.left - b.left) || a.top - b.top);
  picture.scrollTop += first.top - picture.getBoundingClientRect().top - picture.clientHeight / 2;
}

restore();
choose();
showFirst();
form.hidden = false;
reveal();
