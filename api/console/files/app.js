// The whole page, from what is known of the node.
import { duration } from './format.js'
import { Deployment } from './deployment.js'
import { Delivery } from './delivery.js'
import { KeyDialog, StopDialog } from './dialogs.js'
import { html } from './html.js'
import { Jobs } from './jobs.js'
import { Links } from './links.js'
import { Chip } from './parts.js'
import { Round } from './round.js'
import { Workers } from './workers.js'

const LINKS = {
  connecting: ['busy', 'connecting'],
  live: ['good', 'live'],
  lost: ['bad', 'not connected'],
  refused: ['bad', 'a key is needed'],
}
const STATES = { IDLE: 'idle', GENERATING: 'good', VALIDATING: 'busy', STOPPED: 'idle' }
const THEMES = ['auto', 'light', 'dark']

export const App = ({ known, act }) => html`
  <${Head} known=${known} act=${act} />
  <main id="main" tabindex="-1">
    ${known.problem && html`<p class="problem banner">${known.problem}</p>`}
    ${known.health?.reasons.map(reason => html`<p class="problem banner" key=${reason.what}>${troubled(reason, known.now)}</p>`)}
    ${known.link === 'lost' && html`<p class="problem banner">The API does not answer. What is shown may be old; trying again.</p>`}
    ${known.node ? html`<${Node} known=${known} act=${act} />` : html`<${Empty} known=${known} act=${act} />`}
  </main>
  ${known.node && html`<${Links} known=${known} act=${act} />`}
  ${known.dialog === 'key' && html`<${KeyDialog} known=${known} act=${act} />`}
  ${known.dialog === 'stop' && html`<${StopDialog} known=${known} act=${act} />`}
`

const troubled = ({ level, what, more, since }, now) =>
  `${level}: ${what}${since === null || !now ? '' : ` for ${duration(now - since)}`}${more}`

const Head = ({ known, act }) => {
  const [kind, text] = LINKS[known.link]
  return html`<header>
    <h1>Proofline</h1>
    ${known.node && html`<${Chip} kind=${known.health.level === 'down' ? 'bad' : STATES[known.node.state]}><span id="node-state">${known.node.state}</span><//>`}
    <span class="model">${known.deployment?.model ?? ''}</span>
    <span class="spring"></span>
    <${Chip} kind=${kind}>${text}<//>
    <label class="theme">Theme
      <select value=${known.theme} onChange=${event => act.useTheme(event.target.value)}>
        ${THEMES.map(theme => html`<option key=${theme} selected=${theme === known.theme}>${theme}</option>`)}
      </select>
    </label>
    ${known.hasKey && html`<button onClick=${act.forgetKey}>Forget the key</button>`}
  </header>`
}

const Empty = ({ known, act }) =>
  known.link === 'refused'
    ? html`<p>${known.refusal}</p>
        <button class="main" onClick=${() => act.change({ dialog: 'key' })}>Enter a key</button>`
    : html`<p>Reading the node's state …</p>`

const Node = ({ known, act }) => html`
  <${Round} known=${known} act=${act} />
  <${Workers} known=${known} />
  <${Jobs} known=${known} act=${act} />
  <${Delivery} known=${known} />
  <${Deployment} known=${known} />
`
