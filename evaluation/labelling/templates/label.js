// Shows one pair after the other and sends the verdicts. A key counts only while a pair is shown and nothing is being sent, so that no
// verdict is about a pair that was not seen. A verdict that cannot be sent is sent again until the server answers; it writes it once.
"use strict";

const AGAIN_MS = 1000, ANSWER_MS = 30000;
const KEYS = {"1": 0, "2": 1, "3": 2, "=": 2, "4": 3, "5": 4};
const place = (id) => document.getElementById(id);
const annotator = place("annotator").dataset.name;
let task = null, shownAt = 0, busy = true;

function say(text, bad = false) {
  place("status").textContent = text;
  place("status").hidden = !text;
  place("status").classList.toggle("bad", bad);
}

async function ask(path, body) {
  const options = {headers: {"content-type": "application/json"}};
  if (body) Object.assign(options, {method: "POST", body: JSON.stringify(body)});
  for (;;) {
    try {
      const answer = await fetch(path, {...options, signal: AbortSignal.timeout(ANSWER_MS)});
      return {status: answer.status, content: await answer.json()};
    } catch {
      say(body ? "The server does not answer. Your verdict is not saved yet; it is sent again." : "The server does not answer; asking again.", true);
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }
}

function message(role, text) {
  const box = document.createElement("div"), title = document.createElement("h2"), content = document.createElement("div");
  box.className = "message";
  title.textContent = role;
  content.className = "text";
  content.dir = "auto";
  content.textContent = text;
  box.append(title, content);
  return box;
}

function show(content) {
  const {labelled, skipped, left} = content.progress;
  place("counts").textContent = `${labelled} labelled, ${skipped} skipped, ${left} left`;
  place("bar").value = (labelled + skipped) / Math.max(1, labelled + skipped + left);
  task = content.task;
  place("pair").hidden = task === null;
  place("done").hidden = task !== null;
  if (task !== null) {
    place("prompt").replaceChildren(...content.prompt.map((part) => message(part.role, part.content)));
    place("left").textContent = content.left;
    place("right").textContent = content.right;
  }
  const before = content.before || {choice: null, note: null};
  for (const button of document.querySelectorAll("[data-choice]"))
    button.classList.toggle("before", before.choice === Number(button.dataset.choice));
  place("note").value = before.note || "";
  place("note").hidden = !before.note;
  place("note").blur();
  window.scrollTo(0, 0);
  shownAt = performance.now();
  document.body.dataset.task = task || "";
}

async function send(path, body) {
  if (busy) return;
  busy = true;
  const {status, content} = await ask(path, body);
  say(status === 200 ? "" : status === 409 ? `Not counted: ${content.error}.` : content.error, status !== 200 && status !== 409);
  if (content.progress) show(content);
  busy = false;
}

function choose(choice) {
  if (task === null) return;
  const seconds = (performance.now() - shownAt) / 1000;
  send("/api/label", {annotator, task, choice, seconds, note: place("note").value || null});
}

function press(key) {
  if (key in KEYS) choose(KEYS[key]);
  else if (key === "s") choose(null);
  else if (key === "u") send("/api/undo", {annotator});
  else if (key === "?") place("help").hidden = !place("help").hidden;
  else if (key === "Escape") place("help").hidden = true;
  else if (key === "n" && task !== null) {
    place("note").hidden = false;
    place("note").focus();
  } else return false;
  return true;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
  if (event.target === place("note")) {
    if (event.key === "Escape" || (event.key === "Enter" && !event.shiftKey)) {
      place("note").hidden = !place("note").value;
      place("note").blur();
      event.preventDefault();
    }
    return;
  }
  if (event.repeat) return;  // a key that is held down is one verdict
  const arrows = event.shiftKey ? {ArrowLeft: "1", ArrowRight: "5"} : {ArrowLeft: "2", ArrowRight: "4"};
  if (press(arrows[event.key] || event.key)) event.preventDefault();
});

for (const button of document.querySelectorAll("footer button"))
  button.addEventListener("click", () => {
    button.blur();
    if (button.dataset.choice) choose(Number(button.dataset.choice));
    else press(button.dataset.key);
  });

ask(`/api/next?annotator=${encodeURIComponent(annotator)}`).then(({status, content}) => {
  busy = false;
  say(status === 200 ? "" : content.error, true);
  if (status === 200) show(content);
});
