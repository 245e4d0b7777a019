// What the node shall run, and how far each host is with it.
import { clock, count } from './format.js'
import { html } from './html.js'
import { Chip, Facts, Section } from './parts.js'

const KINDS = { running: 'good', starting: 'busy', failed: 'bad', idle: 'idle' }
const HOSTS = { SERVING: 'good', STARTING: 'busy', STOPPING: 'busy', FAILED: 'bad', IDLE: 'idle' }

export const Deployment = ({ known: { deployment, health, node } }) => html`<${Section} id="deployment" title="Deployment"
  beside=${html`<${Chip} kind=${deployment.state === 'running' && health.level === 'down' ? 'bad' : KINDS[deployment.state]}>${deployment.state}<//>`}>
  ${deployment.error && html`<p class="problem">${deployment.error}</p>`}
  <${Facts} of=${[
    ['Model', deployment.model ?? 'none'],
    ['Asked for', deployment.asked_at ? `at ${clock(deployment.asked_at)}, by ${deployment.by === 'start' ? 'a start with --model' : 'a request'}` : null],
    ['Chat policy', node.chat_policy],
    ['Nonces of jobs and rounds so far', count(node.total_processed)],
    ['Version', node.version],
  ]} />
  ${deployment.hosts.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of hosts">
    <table>
      <thead><tr>${['Host', 'State', 'Model', 'Workers', 'vLLM', 'Error'].map(name => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
      <tbody>${deployment.hosts.map((host, i) => html`<tr key=${i}>
        <th scope="row">${host.host}</th>
        <td><${Chip} kind=${host.workers && !host.ready && host.state === 'SERVING' ? 'bad' : HOSTS[host.state]}>${host.state.toLowerCase()}<//></td>
        <td>${host.model ?? '–'}</td>
        <td>${host.ready} of ${host.workers} ready</td>
        <td>${host.vllm_version ?? '–'}</td>
        <td>${host.error ?? '–'}</td>
      </tr>`)}</tbody>
    </table>
  </div>`}
<//>`
