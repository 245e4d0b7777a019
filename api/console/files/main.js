// Holds what is known of the node, and draws the page anew with each change.
import { render } from './vendor/preact.mjs'
import { actions } from './actions.js'
import { App } from './app.js'
import { hasKey, setKey } from './api.js'
import { changes } from './changes.js'
import { html } from './html.js'
import { follow } from './stream.js'

const place = document.getElementById('app')
const known = {
  link: 'connecting', // connecting, live, lost or refused
  refusal: '', // why the key, or its absence, was refused
  hasKey: hasKey(),
  dialog: null, // 'key' or 'stop'
  theme: document.documentElement.dataset.theme ?? 'auto',
  node: null, // the sections: see api/console/view.py
}

function change(what) {
  Object.assign(known, what)
  render(html`<${App} known=${known} act=${act} />`, place)
}

/** For screen readers: what happened, in a sentence. */
function say(text) {
  document.getElementById('said').textContent = text
}

function listen() {
  follow({
    sections(found) {
      const told = changes(known, found)
      change({ ...found, link: 'live', refusal: '' })
      if (told) say(told)
    },
    lost() {
      if (known.link === 'live') say('The connection to the node is lost. Trying again.')
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

place.replaceChildren()
change({})
listen()
