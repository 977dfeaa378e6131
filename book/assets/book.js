// The theme's download button opens the notebook's JSON in the browser; readers want the file.
addEventListener("DOMContentLoaded", () =>
  document
    .querySelectorAll("a.btn-download-source-button")
    .forEach((link) => link.setAttribute("download", "")),
);
