// Theorems, terms, citations and formulas open in place: where the mouse rests on their link, where the keyboard
// reaches it, at a tap. Escape closes. A click and a second tap lead there, as without this script.
(() => {
  const LINK = 'a.internal[href*="#"]:not(.headerlink, :has(.std-ref, .std-numref, .pre))';
  const REST = 250; // milliseconds of the mouse, on a link and beside it
  const GAP = 8; // pixels between the box and what is around it
  const box = Object.assign(document.createElement("div"), { id: "peek", hidden: true });
  box.setAttribute("role", "tooltip");
  const article = document.querySelector("article.bd-article");
  article?.append(box);

  // What a link leads to, as it stands on its page, without what only that page can use.
  const pages = new Map();
  async function found(link) {
    const { href, hash } = new URL(link.href);
    const address = href.slice(0, -hash.length);
    if (!pages.has(address))
      pages.set(address, fetch(address).then(async (answer) => {
        if (!answer.ok) throw new Error(answer.statusText);
        return new DOMParser().parseFromString(await answer.text(), "text/html");
      }));
    const target = (await pages.get(address)).getElementById(decodeURIComponent(hash.slice(1)));
    if (!target?.matches(".proof, .citation, .glossary dt, div.math")) return null;
    const copy = document.createElement(target.matches("dt") ? "dl" : "div");
    copy.append(target.cloneNode(true));
    if (copy.matches("dl")) {
      let meaning = target;
      while (meaning.matches("dt")) meaning = meaning.nextElementSibling; // of several names
      copy.append(meaning.cloneNode(true));
    }
    for (const part of copy.querySelectorAll(".headerlink")) part.remove();
    for (const part of copy.querySelectorAll("a")) part.replaceWith(...part.childNodes);
    for (const part of copy.querySelectorAll("[id], [role]"))
      for (const name of ["id", "role"]) part.removeAttribute(name);
    for (const part of window.MathJax ? [] : copy.querySelectorAll(".math"))
      part.textContent = part.textContent.replace(/\\[()[\]]/g, ""); // a page without formulas has none
    return copy;
  }

  let opener, wanted, timer;
  function close() {
    clearTimeout(timer);
    opener?.removeAttribute("aria-describedby");
    opener = wanted = null;
    box.hidden = true;
  }

  // False if a link can only be followed: one to other things, and any in a book on disk.
  async function open(link) {
    wanted = link;
    const copy = await found(link).catch(() => null);
    if (wanted !== link) return true; // another one is
    if (!copy) return false;
    close();
    [wanted, opener] = [link, link];
    link.setAttribute("aria-describedby", box.id);
    link.removeAttribute("title"); // the browser would show it on top
    window.MathJax?.typesetClear?.([box]);
    box.replaceChildren(copy);
    box.hidden = false;
    place();
    await window.MathJax?.typesetPromise?.([box]);
    if (opener === link) place();
    return true;
  }

  // Below the first line of the link, or above it where more room is.
  function place() {
    const around = box.offsetParent.getBoundingClientRect();
    const [line] = opener.getClientRects();
    const below = line.bottom + box.offsetHeight < innerHeight || line.top < innerHeight / 2;
    const top = below ? line.bottom + GAP : line.top - GAP - box.offsetHeight;
    const left = Math.min(line.left, article.getBoundingClientRect().right - box.offsetWidth);
    box.style.top = `${top - around.top}px`;
    box.style.left = `${Math.max(left, GAP) - around.left}px`;
    box.tabIndex = box.scrollHeight > box.clientHeight ? 0 : -1;
  }

  const linked = (event) => article?.contains(event.target) && event.target.closest(LINK);
  let touched = false;
  addEventListener("pointerdown", ({ pointerType }) => (touched = pointerType !== "mouse"), true);
  addEventListener("pointerover", (event) => {
    if (event.pointerType !== "mouse") return;
    const link = linked(event);
    clearTimeout(timer);
    if (link && link !== opener) timer = setTimeout(open, REST, link);
    else if (!link && !box.contains(event.target) && opener !== document.activeElement)
      timer = setTimeout(close, REST);
  });
  addEventListener("focusin", (event) => {
    const link = linked(event);
    if (link && link.matches(":focus-visible")) open(link);
  });
  addEventListener("focusout", ({ relatedTarget }) => box.contains(relatedTarget) || close());
  addEventListener("click", async (event) => {
    const link = linked(event);
    if (!link && !box.contains(event.target)) close();
    if (!link || link === opener || !touched || !event.detail) return; // no detail: of the keyboard
    event.preventDefault();
    if (!(await open(link))) location.href = link.href;
  });
  addEventListener("keydown", ({ key }) => key === "Escape" && close());
})();
