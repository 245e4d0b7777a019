// The node's problems, its deployment, and each host's progress.
import { sentence } from './bar.js'
import { count, duration, moment, plural } from './format.js'
import { html } from './html.js'
import { Chip, Facts, Section, Table } from './parts.js'

const KINDS = { running: 'good', starting: 'busy', failed: 'bad', idle: 'idle' }
const HOSTS = { SERVING: 'good', STARTING: 'busy', STOPPING: 'busy', KEEPING: 'busy', FAILED: 'bad', IDLE: 'idle' }

export const Deployment = ({ known: { deployment, node, figures } }) => html`<${Section} id="deployment" title="Deployment"
  beside=${html`<${Chip} kind=${KINDS[deployment.state]}>${deployment.state}<//>`}>
  ${deployment.error && html`<p class="problem">${deployment.error}</p>`}
  <${Facts} of=${[
    ['Model', deployment.model ?? 'none'],
    ['Requested', deployment.asked_at ? `${moment(deployment.asked_at)}, by ${deployment.by === 'start' ? 'a start with --model' : 'a request'}` : null],
    ['Chat policy', node.chat_policy],
    ['Nonces computed', count(figures.total_processed)],
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

/** The list of all problems of the node; the bar has room for two lines only. */
export const Trouble = ({ known: { health, silent, round, now } }) => {
  if (!health.reasons.length) return null
  const { failures, last_error: error } = round?.outbox ?? { failures: 0 }
  return html`<${Section} id="trouble" title="What is wrong">
    <ul>
      ${health.reasons.map(reason => html`<li key=${reason.what}>${sentence(reason, now)}</li>`)}
      ${failures > 0 && html`<li>The round's receiver refused ${plural(failures, 'payload')} in a row: ${error}</li>`}
      ${silent.map(({ receiver, next_try_at: at }) => html`<li key=${receiver}><code>${receiver}</code> is tried again ${at > now ? `in ${duration(at - now)}` : 'now'}</li>`)}
    </ul>
  <//>`
}
