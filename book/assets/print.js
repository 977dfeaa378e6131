// On paper the book is light, whatever the theme, and what is wider than the column gets smaller
// letters (print.css). All is measured on the screen, in letters: a line on paper has 49 of them.
const LINE = 49;
addEventListener("beforeprint", () => {
  const html = document.documentElement;
  const { theme } = html.dataset;
  html.dataset.theme = "light";
  addEventListener("afterprint", () => (html.dataset.theme = theme), { once: true });
  const line = LINE * parseFloat(getComputedStyle(html).fontSize);
  const article = document.querySelector(".bd-article");
  for (const wide of article?.querySelectorAll("table, div.math") ?? []) {
    const indent = article.clientWidth - wide.parentElement.clientWidth;
    const needed = Math.max(wide.scrollWidth, ...[...wide.children].map((part) => part.scrollWidth));
    wide.style.setProperty("--fit", Math.min(1, (line - indent) / needed));
  }
});
