// MathJax comes when the page has been painted, in the parts that the book needs; nothing waits for it.
// Until it is there, and afterwards, `MathJax.startup.promise` resolves when all is typeset.
MathJax.loader = { load: ["core", "input/tex", "output/chtml", "a11y/assistive-mml"] };
MathJax.startup = {
  promise: new Promise((typeset) => {
    const script = document.createElement("script");
    script.src = new URL("mathjax/startup.js", document.currentScript.src);
    script.onload = () => typeset(MathJax.startup.promise);
    script.onerror = () => typeset();
    requestAnimationFrame(() => setTimeout(() => document.head.append(script)));
  }),
};
