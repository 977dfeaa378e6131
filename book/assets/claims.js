// The page "Claims and verdicts": show the claims of one paper, kind or verdict.
// Everything is read off the tables, which are complete without this script.

const form = document.getElementById("claims-filter");

const claims = [...document.querySelectorAll("table.claims tbody tr")].map((row) => {
  const [claim, , evidence] = row.cells;
  const section = row.closest("section");
  return {
    row,
    section,
    paper: section.querySelector("h2").firstChild.textContent.replace(/^[\d.\s]+/, ""),
    kind: claim.querySelector("em").textContent,
    verdict: evidence.querySelector("p").textContent,
  };
});

function choose() {
  const asked = [...form.querySelectorAll("select")].filter((select) => select.value);
  for (const claim of claims)
    claim.row.hidden = !asked.every((select) => claim[select.name] === select.value);
  const shown = claims.filter((claim) => !claim.row.hidden);
  for (const { section } of claims)
    section.hidden = !shown.some((claim) => claim.section === section);
  form.querySelector("output").textContent = `${shown.length} of ${claims.length} claims`;
}

for (const select of form.querySelectorAll("select"))
  for (const value of new Set(claims.map((claim) => claim[select.name])))
    select.add(new Option(value));
form.addEventListener("change", choose);
form.hidden = false;
choose();
