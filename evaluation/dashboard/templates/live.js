// Keeps an open page up to date: the server sends the parts of the page that changed (evaluation/dashboard/app.py).
"use strict"

const AGAIN = 3000 // milliseconds until a refused stream is asked for again
const PAUSE = 300 // milliseconds without a key after which the server is asked for the filtered runs
const sections = () => [...document.querySelectorAll("section[data-digest]")]
let stream = null
let pause = null

function tell(state, text) {
  const told = document.getElementById("live")
  told.className = state
  told.textContent = text
}

function show(name, part) {
  const section = document.getElementById(`part-${name}`)
  if (!section || section.dataset.digest === part.digest) return
  if (section.contains(document.getElementById("filter"))) return // it has what is being typed
  const open = [...section.querySelectorAll("details[open]")].map(one => one.dataset.key)
  const log = section.querySelector("pre.log")
  const at = log && log.scrollTop + log.clientHeight < log.scrollHeight - 20 ? log.scrollTop : null // null: at its end
  section.innerHTML = part.html
  section.dataset.digest = part.digest
  for (const one of section.querySelectorAll("details")) if (open.includes(one.dataset.key)) one.open = true
  scroll(section, at)
  filter()
}

function filter() { // hides the runs that lack a word of the box
  const box = document.getElementById("filter")
  if (!box) return
  const words = box.value.toLowerCase().split(/\s+/)
  for (const row of document.querySelectorAll("tr[data-text]")) {
    row.hidden = !words.every(word => row.dataset.text.includes(word))
  }
}

function find(words) { // gets the runs with these words from the server, which may have more of them than the page
  const address = new URL(location)
  if (words.trim()) address.searchParams.set("filter", words)
  else address.searchParams.delete("filter")
  history.replaceState(null, "", address)
  connect()
}

function scroll(section, at) {
  for (const log of section.querySelectorAll("pre.log")) log.scrollTop = at === null ? log.scrollHeight : at
}

function connect() {
  if (stream) stream.close()
  const query = new URLSearchParams(location.search)
  query.set("have", sections().map(one => `${one.id.replace("part-", "")}:${one.dataset.digest}`).join(","))
  stream = new EventSource(`/events${location.pathname}?${query}`)
  stream.onopen = () => tell("on", "live")
  stream.addEventListener("parts", event => {
    for (const [name, part] of Object.entries(JSON.parse(event.data))) show(name, part)
  })
  stream.addEventListener("gone", () => {
    stream.close()
    tell("off", "removed: these files are no more")
  })
  stream.onerror = () => {
    tell("off", "not connected: the dashboard has ended, or its token changed")
    if (stream.readyState === EventSource.CLOSED && !document.hidden) setTimeout(connect, AGAIN)
  }
}

document.addEventListener("visibilitychange", () => { // a hidden page costs nothing
  if (!document.hidden) connect()
  else if (stream) stream.close()
})
document.addEventListener("input", event => {
  if (event.target.id !== "filter") return
  filter()
  clearTimeout(pause)
  pause = setTimeout(find, PAUSE, event.target.value)
})
filter() // a browser may keep the text of the box when a page is loaded again
sections().forEach(section => scroll(section, null))
connect()
