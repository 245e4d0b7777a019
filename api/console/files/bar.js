// The top bar: the node's health, since when, and the reasons. The page's title and icon also show the health.
import { html } from './html.js'
import { duration, moment } from './format.js'
import { Chip } from './parts.js'

const KINDS = { ok: 'good', degraded: 'busy', down: 'bad', unknown: 'idle' }
const ICONS = { ok: 'icon.svg', degraded: 'icon-degraded.svg', down: 'icon-down.svg', unknown: 'icon-down.svg' }
const THEMES = ['auto', 'light', 'dark']

/** Returns what the bar shows: [state (ok, degraded, down or unknown), word for the state, reason]. */
export function verdict({ link, health, problem, refusal, now }) {
  if (link === 'refused') return ['unknown', 'a key is needed', refusal]
  if (link === 'lost') return ['down', 'not connected', 'The API does not answer. The page may be out of date. Reconnecting.']
  if (!health) return ['unknown', 'connecting', "Reading the node's state …"]
  if (problem) return ['down', 'down', `${health.reasons.map(reason => sentence(reason, now)).join('; ')}. ${problem}`]
  const reasons = health.reasons.map(reason => sentence(reason, now)).join('; ')
  return [health.level, health.level === 'ok' ? 'OK' : health.level, reasons || 'No problems.']
}

/** Returns a reason of the node's health as a sentence without a full stop. */
export const sentence = ({ what, more, since }, now) => `${what}${since === null || !now ? '' : ` for ${duration(now - since)}`}${more}`

export const Bar = ({ known, act }) => {
  const [state, word, reason] = verdict(known)
  const since = known.link === 'live' && !known.problem ? known.health?.since : null
  return html`<header class="bar ${state}"><div class="row">
    <h1>Proofline</h1>
    <${Chip} kind=${KINDS[state]}><span id="health">${word}</span><//>
    <p class="reason" title=${reason}>${reason}${since ? html` <small>since ${moment(since)}</small>` : ''}</p>
    <span class="model" title=${known.deployment?.model ?? ''}>${known.deployment?.model ?? ''}</span>
    <label class="theme"><span class="unseen">Theme</span>
      <select value=${known.theme} onChange=${event => act.useTheme(event.target.value)}>
        ${THEMES.map(theme => html`<option key=${theme} selected=${theme === known.theme}>${theme}</option>`)}
      </select>
    </label>
    ${known.hasKey && html`<button onClick=${act.forgetKey}>Forget the key</button>`}
  </div></header>`
}

/** Shows the node's health in the tab's title and icon. */
export function tell(known) {
  const [state, word] = verdict(known)
  const model = known.deployment?.model
  const title = `${state === 'ok' ? '' : `${word.toUpperCase()}: `}Proofline${model ? `, ${model}` : ''}`
  if (document.title !== title) document.title = title
  const icon = document.querySelector('link[rel=icon]')
  const href = `console/${ICONS[state]}`
  if (icon.getAttribute('href') !== href) icon.setAttribute('href', href)
}
