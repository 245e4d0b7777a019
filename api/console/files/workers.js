// A card for each worker, and what each machine's GPUs do.
import { count, duration, rate } from './format.js'
import { html } from './html.js'
import { Chip, Facts, Section } from './parts.js'

const KINDS = { ready: 'good', starting: 'busy', draining: 'busy', hung: 'bad', silent: 'bad', away: 'bad' }

export const Workers = ({ known }) => {
  const cards = joined(known)
  const ready = known.workers.filter(({ state, is_silent }) => state === 'ready' && !is_silent).length
  return html`<${Section} id="workers" title="Workers" beside=${html`<span id="n-ready">${ready} ready</span>`}>
    ${!cards.length && html`<p>No worker is here: proofline up or proofline workers starts some.</p>`}
    <ul class="cards">${cards.map(card => html`<${Card} key=${card.key} card=${card} known=${known} />`)}</ul>
    ${Object.entries(known.machines).map(([host, devices]) => html`<${Gpus} key=${host} host=${host} devices=${devices} />`)}
  <//>`
}

/** Workers and the processes that supervisors keep for them, each pair once. Those that are being restarted too. */
function joined({ workers, logs }) {
  const left = new Map(workers.map(worker => [`${worker.host} ${worker.pid}`, worker]))
  const cards = []
  for (const { host, workers: children } of logs) {
    for (const child of children) {
      const worker = left.get(`${host} ${child.pid}`)
      left.delete(`${host} ${child.pid}`)
      cards.push({ key: `${host} ${child.name}`, name: child.name, host, worker, lines: child.lines, pid: child.pid })
    }
  }
  for (const worker of left.values()) cards.push({ key: worker.id, name: worker.name, host: worker.host, worker, pid: worker.pid })
  return cards.sort((a, b) => a.key.localeCompare(b.key, 'en', { numeric: true }))
}

const stateOf = ({ worker, pid }) => {
  if (!worker) return pid ? 'starting' : 'away'
  return worker.is_silent ? 'silent' : worker.state
}

const Card = ({ card, known }) => {
  const { worker, lines } = card
  const state = stateOf(card)
  return html`<li class="card">
    <h3>${card.name} <small>${card.host}</small></h3>
    <p><${Chip} kind=${KINDS[state]}>${state}<//></p>
    ${worker && html`<${Worker} worker=${worker} known=${known} />`}
    ${lines?.length > 0 && html`<details>
      <summary>Last lines of its log</summary>
      <pre tabindex="0" role="region" aria-label="Log of ${card.name}">${lines.join('\n')}</pre>
    </details>`}
  </li>`
}

const Worker = ({ worker, known: { round, now } }) => {
  const { info, stats, devices } = worker
  const own = round?.workers[worker.id]
  return html`<${Facts} of=${[
    ['Round', own ? `${rate(own.nonces_per_second)} nonces/s, ${count(own.total_processed)} in all` : null],
    ['GPU', devices.join(', ') || 'none'],
    ['Model', `${worker.model} (${worker.engine}${info ? `, ${info.dtype}` : ''})`],
    ['Micro-batch', info ? `${count(info.max_batch_tokens)} tokens; a nonce has ${count(info.max_seq_len)} at most` : null],
    ['Slices', stats.slices === undefined ? null : count(stats.slices)],
    ['Chat', stats.chat_total === undefined ? 'none' : `${count(stats.chat_active)} now, ${count(stats.chat_total)} in all, ${count(stats.chat_refused)} refused`],
    ['Chats validated', stats.validations_pass === undefined ? null : `${count(stats.validations_pass)} in one forward, ${count(stats.validations_steps)} by steps`],
    ['Waits for chat', stats.skips === undefined ? null : count(stats.skips)],
    ['Proofs had the engine', stats.proof_busy_s === undefined ? null : duration(stats.proof_busy_s)],
    ['Running for', `${duration(now - worker.started_at)}, process ${worker.pid}`],
  ]} />`
}

const Gpus = ({ host, devices }) => html`<div class="scroll" tabindex="0" role="region" aria-label="GPUs of ${host}">
  <table>
    <caption>GPUs of ${host}</caption>
    <thead><tr><th scope="col">GPU</th><th scope="col">Busy</th><th scope="col">Memory</th><th scope="col">Temperature</th></tr></thead>
    <tbody>${devices.map(device => html`<tr key=${device.uuid}>
      <th scope="row">${device.index}: ${device.name}</th>
      <td>${told(device.utilization_percent, ' %')}</td>
      <td>${told(device.used_memory_mb, '')} of ${told(device.total_memory_mb, ' MB')}</td>
      <td>${device.is_available ? told(device.temperature_c, ' °C') : device.error_message}</td>
    </tr>`)}</tbody>
  </table>
</div>`

const told = (n, unit) => (n === null || n === undefined ? '–' : `${count(n)}${unit}`)
