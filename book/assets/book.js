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
