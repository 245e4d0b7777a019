// The row of the node's most important figures.
import { count, plural, rate, seconds } from './format.js'
import { html } from './html.js'

const ROUNDS = { IDLE: 'no round', GENERATING: 'a round generates', VALIDATING: 'a round validates', STOPPED: 'no round' }

export const Figures = ({ known: { figures: f, node } }) => {
  const { honest, fraud } = f.validations
  return html`<ul class="figures" aria-label="Figures">
    <${Figure} id="rate" name="nonces/s" value=${rate(f.nonces_per_second)} note=${ROUNDS[node.state]} />
    <${Figure} id="ready" name="workers ready" value="${count(f.ready)} of ${count(f.workers)}" note=${plural(Object.keys(node.models).length, 'model')} bad=${f.ready < f.workers} />
    <${Figure} id="chats" name="chats now" value=${f.chats === null ? '–' : count(f.chats)} note=${f.chats === null ? 'no chat here' : node.chat_policy} />
    <${Figure} id="first-token" name="first token, p95" value=${f.first_token ? seconds(f.first_token) : '–'} note="last 5 min" />
    <${Figure} id="queue" name="nonces queued" value=${count(f.queued_nonces)} note="${plural(f.jobs.running + f.jobs.queued, 'job')}, ${count(f.jobs.running)} running" />
    <${Figure} id="undelivered" name="undelivered" value=${count(f.undelivered)} note=${f.artifacts_waiting ? plural(f.artifacts_waiting, 'artifact') : 'rounds and jobs'} />
    <${Figure} id="gpu-use" name="GPU use" value=${f.gpu_use === null ? '–' : `${f.gpu_use} %`} note=${f.gpu_use === null ? 'no GPU' : 'mean of all'} />
    <${Figure} id="validations" name="validations today" value=${count(honest + fraud)} note=${plural(fraud, 'fraud')} bad=${fraud > 0} />
  </ul>`
}

const Figure = ({ id, name, value, note, bad }) => html`<li class=${bad ? 'figure bad' : 'figure'}>
  <span>${name}</span><strong id=${id} title=${value}>${value}</strong><small title=${note}>${note}</small>
</li>`
