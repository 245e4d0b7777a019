// The complete page, rendered from the known state of the node (main.js).
import { Bar } from './bar.js'
import { Chart } from './chart.js'
import { Deployment, Trouble } from './deployment.js'
import { Dialogs } from './dialogs.js'
import { Events } from './events.js'
import { Figures } from './figures.js'
import { html } from './html.js'
import { Links } from './links.js'
import { Work } from './work.js'
import { WorkPage } from './work_page.js'
import { Workers } from './workers.js'

export const App = ({ known, act }) => html`
  <${Bar} known=${known} act=${act} />
  <main id="main" tabindex="-1">
    ${known.node ? html`<${Node} known=${known} act=${act} />` : html`<${Empty} known=${known} act=${act} />`}
  </main>
  ${known.node && html`<${Links} known=${known} act=${act} />`}
  <${Dialogs} known=${known} act=${act} />
`

const Empty = ({ known, act }) =>
  known.link === 'refused' && html`<p>${known.refusal}</p>
    <button class="main" onClick=${() => act.change({ dialog: 'key' })}>Enter a key</button>`

const Node = ({ known, act }) => html`
  <${Figures} known=${known} />
  ${known.workId
    ? html`<${WorkPage} key=${known.workId} id=${known.workId} known=${known} act=${act} />`
    : html`<${Chart} known=${known} act=${act} />
        <${Workers} known=${known} act=${act} />
        <${Work} known=${known} act=${act} />
        <${Events} known=${known} act=${act} />
        <${Trouble} known=${known} />
        <${Deployment} known=${known} />`}
`
