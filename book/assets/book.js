// The theme's download button opens the notebook's JSON in the browser; readers want the file.
addEventListener("DOMContentLoaded", () =>
  document
    .querySelectorAll("a.btn-download-source-button")
    .forEach((link) => link.setAttribute("download", "")),
);
// Entries of the bibliography have a role of their own, so that what holds them is no list.
addEventListener("DOMContentLoaded", () =>
  document.querySelectorAll(".citation-list").forEach((list) => list.removeAttribute("role")),
);
// Tables that are wider than their box scroll in it, with the arrow keys, too.
addEventListener("load", () =>
  document.querySelectorAll(".table-output > .output").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }),
);
