// Holds the known state of the node, and draws the page after each change.
import { render } from './vendor/preact.mjs'
import { actions } from './actions.js'
import { App } from './app.js'
import { askJson, hasKey, setKey } from './api.js'
import { tell } from './bar.js'
import { changes } from './changes.js'
import { merged } from './events.js'
import { html } from './html.js'
import { grafana, keepGrafana } from './links.js'
import { joined } from './past.js'
import { workOf } from './route.js'
import { follow } from './stream.js'

// Seconds before the newest known event from which events are fetched again, because the hosts' clocks differ.
const OVERLAP_S = 60

const place = document.getElementById('app')
const known = {
  link: 'connecting', // connecting, live, lost or refused
  refusal: '', // why the key, or its absence, was refused
  hasKey: hasKey(),
  dialog: null, // key, stop, round, job or grafana
  drawer: null, // the name of the worker whose drawer is open
  theme: document.documentElement.dataset.theme ?? 'auto',
  grafana: grafana(),
  workId: workOf(location.hash),
  shownWork: { kind: '', state: '', text: '', all: false },
  shownEvents: { kind: '', n: 15 },
  step: 5, // seconds of a step of the range shown
  past: null, // the history of that range: see steps_of in api/console/view.py
  log: [], // events, the newest first
  node: null, // a section of the state, as are further keys: see api/console/view.py
}

function change(what) {
  Object.assign(known, what)
  tell(known)
  render(html`<${App} known=${known} act=${act} />`, place)
}

/** Announces a sentence to screen readers. */
function say(text) {
  document.getElementById('said').textContent = text
}

async function readPast() {
  const step = known.step
  try {
    const past = await askJson(`api/v1/console/history?step=${step}`)
    if (step === known.step) change({ past })
  } catch {
    // fetched again with the next step; the stream reports a lost connection
  }
}

async function readLog() {
  const after = known.log.length ? known.log[0].at - OVERLAP_S : 0
  try {
    change({ log: merged(known.log, await askJson(`api/v1/console/log?after=${after}`)) })
  } catch {
    // as in readPast
  }
}

/** Adds new steps to the shown history. Fetches new events, and the complete history again if steps are missing. */
function ask(found) {
  if ('events' in found) readLog()
  const told = found[`steps${known.step}`]
  if (!told) return
  const past = known.past && joined(known.past, told)
  if (past) known.past = past
  else readPast()
}

function listen() {
  follow({
    sections(found) {
      const told = changes(known, found)
      ask(found)
      change({ ...found, link: 'live', refusal: '' })
      if (told) say(told)
    },
    lost() {
      if (known.link === 'live') say('The connection to the node is lost. Reconnecting.')
      change({ link: 'lost' })
    },
    refused(error) {
      change({ link: 'refused', refusal: error.message, dialog: 'key' })
    },
  })
}

const act = {
  ...actions(say),
  change,
  useRange(step) {
    change({ step })
    readPast()
  },
  useGrafana(url) {
    keepGrafana(url)
    change({ grafana: grafana() })
  },
  useKey(key) {
    setKey(key)
    change({ hasKey: hasKey(), dialog: null, link: 'connecting', refusal: '' })
    listen()
  },
  forgetKey() {
    setKey('')
    location.reload()
  },
  useTheme(theme) {
    if (theme === 'auto') {
      localStorage.removeItem('proofline-theme')
      delete document.documentElement.dataset.theme
    } else {
      localStorage.setItem('proofline-theme', theme)
      document.documentElement.dataset.theme = theme
    }
    change({ theme })
  },
}

addEventListener('hashchange', () => {
  change({ workId: workOf(location.hash), jobProblem: '' })
  scrollTo(0, 0)
})
place.replaceChildren()
change({})
listen()
