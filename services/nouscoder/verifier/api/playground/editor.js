// The editor of the program: line numbers, indentation, and the colours of highlight.js behind the text.
const MAX_COLORED = 60000; // characters; a longer program is drawn without colours
let leaveWithTab = false;

function colored(code) {
  const language = LANGUAGES[at("language").value].highlight;
  if (!window.hljs || at("type").value === "math" || code.length > MAX_COLORED || !hljs.getLanguage(language)) return null;
  return hljs.highlight(code, { language, ignoreIllegals: true }).value; // escaped by highlight.js
}

function drawCode() {
  const code = at("code").value;
  const count = code.split("\n").length;
  at("lines").textContent = Array.from({ length: count }, (_, index) => index + 1).join("\n") + "\n\n";
  const colors = colored(code);
  at("editor").classList.toggle("colored", colors !== null);
  at("colors").innerHTML = colors === null ? "" : colors;
  followScroll();
}

function followScroll() {
  at("lines").scrollTop = at("code").scrollTop;
  at("colors").style.transform = `translate(${-at("code").scrollLeft}px, ${-at("code").scrollTop}px)`;
}

function insertText(area, text) {
  area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
  drawCode();
}

function shiftLines(area, back) {
  const start = area.value.lastIndexOf("\n", area.selectionStart - 1) + 1;
  const old = area.value.slice(start, area.selectionEnd);
  const moved = back ? old.replace(/^ {1,4}/gm, "") : old.replace(/^/gm, "    ");
  area.setRangeText(moved, start, area.selectionEnd, "select");
  drawCode();
}

function onEditorKey(event) {
  const area = event.target;
  if (event.key === "Escape") leaveWithTab = true;
  else if (event.key === "Tab" && !leaveWithTab) {
    event.preventDefault();
    const many = area.value.slice(area.selectionStart, area.selectionEnd).includes("\n");
    if (many || event.shiftKey) shiftLines(area, event.shiftKey);
    else insertText(area, "    ");
  } else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    const line = area.value.slice(area.value.lastIndexOf("\n", area.selectionStart - 1) + 1, area.selectionStart);
    insertText(area, "\n" + line.match(/^\s*/)[0] + (/:\s*$/.test(line) ? "    " : ""));
  }
  if (event.key !== "Escape" && event.key !== "Tab") leaveWithTab = false;
}

