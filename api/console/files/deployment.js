// What the node shall run, how far each host is with it, and which receivers do not answer.
import { count, duration, moment } from './format.js'
import { html } from './html.js'
import { Chip, Facts, Section, Table } from './parts.js'

const KINDS = { running: 'good', starting: 'busy', failed: 'bad', idle: 'idle' }
const HOSTS = { SERVING: 'good', STARTING: 'busy', STOPPING: 'busy', FAILED: 'bad', IDLE: 'idle' }

export const Deployment = ({ known: { deployment, node, figures } }) => html`<${Section} id="deployment" title="Deployment"
  beside=${html`<${Chip} kind=${KINDS[deployment.state]}>${deployment.state}<//>`}>
  ${deployment.error && html`<p class="problem">${deployment.error}</p>`}
  <${Facts} of=${[
    ['Model', deployment.model ?? 'none'],
    ['Asked for', deployment.asked_at ? `${moment(deployment.asked_at)}, by ${deployment.by === 'start' ? 'a start with --model' : 'a request'}` : null],
    ['Chat policy', node.chat_policy],
    ['Nonces of jobs and rounds so far', count(figures.total_processed)],
    ['Version', node.version],
  ]} />
  ${deployment.hosts.length > 0 && html`<${Table} name="Hosts" columns=${['Host', 'State', 'Model', 'Workers', 'vLLM', 'Error']} rows=${deployment.hosts.map((host, i) => [i, [
    host.host,
    html`<${Chip} kind=${HOSTS[host.state]}>${host.state.toLowerCase()}<//>`,
    host.model ?? '–',
    `${host.ready} of ${host.workers} ready`,
    host.vllm_version ?? '–',
    host.error ? html`<span class="problem clipped" title=${host.error}>${host.error}</span>` : '–',
  ]])} />`}
<//>`

export const Receivers = ({ known: { silent, round, now } }) => {
  const failing = round?.outbox.failures > 0
  if (!silent.length && !failing) return null
  return html`<${Section} id="receivers" title="Receivers in trouble">
    ${failing && html`<p class="problem">The receiver of the round did not take ${count(round.outbox.failures)} payloads in a row: ${round.outbox.last_error}</p>`}
    ${silent.length > 0 && html`<ul>${silent.map(({ receiver, failures, next_try_at }) => html`<li key=${receiver}>
      <code>${receiver}</code> does not answer: ${count(failures)} tries in a row, the next ${next_try_at > now ? `in ${duration(next_try_at - now)}` : 'now'}
    </li>`)}</ul>`}
  <//>`
}
