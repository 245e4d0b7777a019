// The round that was started last: its numbers, its pace, and how to start or stop one.
import { Pace } from './chart.js'
import { clock, count, duration, plural, rate } from './format.js'
import { html } from './html.js'
import { Facts, Form, Section } from './parts.js'

export const Round = ({ known, act }) => {
  const { round } = known
  const runs = round?.state === 'GENERATING' || round?.state === 'VALIDATING'
  const stop = runs && html`<button class="danger" onClick=${() => act.change({ dialog: 'stop' })}>Stop the round …</button>`
  return html`<${Section} id="round" title="Round" beside=${stop}>
    ${known.stopProblem && html`<p role="alert" class="problem">${known.stopProblem}</p>`}
    ${round ? html`<${Numbers} known=${known} />` : html`<p>No round was started yet.</p>`}
    ${round && known.pace && html`<${Pace} key=${round.id} pace=${known.pace} theme=${known.theme} />`}
    ${!runs && html`<${Start} known=${known} act=${act} />`}
  <//>`
}

const Numbers = ({ known: { round, now, health } }) => {
  const elapsed = round.started_at ? (round.stopped_at ?? now) - round.started_at : 0
  const { config } = round
  return html`
    <div class="tiles">
      <${Tile} id="round-rate" name="nonces/s now" value=${rate(round.nonces_per_second)} />
      <${Tile} id="round-total" name="nonces computed" value=${count(round.total_processed)} />
      <${Tile} name="nonces/s of the whole round" value=${rate(elapsed ? round.total_processed / elapsed : 0)} />
      <${Tile} name=${round.stopped_at ? 'from start to stop' : 'since its start'} value=${duration(elapsed)} />
    </div>
    ${round.error && html`<p class="problem">It stopped by itself: ${round.error}</p>`}
    ${round.exhausted && html`<p>All nonces of its sequence are computed.</p>`}
    ${round.outbox.full && html`<p class="problem">It pauses: too many artifacts wait for its receiver.</p>`}
    <${Facts} of=${[
      ['State', round.state],
      ['Scheme', round.scheme],
      ['Model', config.params?.model ?? config.model],
      ['Block', `${config.block_hash} (height ${config.block_height})`],
      ['Public key', config.public_key],
      ['Length of a nonce', config.params?.seq_len ?? config.seq_len],
      ['Node', `${config.node_id} of ${config.node_count}`],
      ['Reported', count(round.n_reported)],
      ['Without a finite state', round.n_excluded ? `${count(round.n_excluded)}, the last ${round.excluded_nonces.join(', ')}` : null],
      ['Workers so far', plural(Object.keys(round.workers).length, 'start') + ` of workers, ${count(health.workers_ready)} of ${count(health.workers)} ready now`],
      ['Started', round.started_at ? clock(round.started_at) : 'not yet'],
    ]} />`
}

const Tile = ({ id, name, value }) => html`<div class="tile"><strong id=${id}>${value}</strong><span>${name}</span></div>`

const Start = ({ known: { node, round }, act }) => {
  const models = Object.entries(node.models)
  if (!models.length) return html`<p>A round can be started when a worker is ready.</p>`
  const longest = Math.min(...models.map(([, info]) => info.max_seq_len))
  return html`<details open=${!round}>
    <summary>Start a round</summary>
    <${Form} id="start" verb="Start the round" submit=${act.startRound} fields=${[
      ['model', 'Model', models.map(([name]) => name)],
      ['block_hash', 'Block hash', 'text', 'console'],
      ['block_height', 'Block height', 'number', '1'],
      ['public_key', 'Public key', 'text', 'console'],
      ['node_id', 'Node id', 'number', '0', 'from 0'],
      ['node_count', 'Of how many nodes', 'number', '1'],
      ['seq_len', 'Length of a nonce', 'number', String(Math.min(256, longest)), `at most ${longest}`],
      ['k_dim', 'k_dim', 'number', '12'],
      ['url', 'Receiver', 'url', '', 'empty: nothing is sent'],
    ]} />
  </details>`
}
