// Jobs: those that run, the newest, their verdicts; and a small one to try.
import { MOST_NONCES } from './actions.js'
import { clock, count, duration } from './format.js'
import { html } from './html.js'
import { Chip, Form, Section } from './parts.js'

const KINDS = { queued: 'idle', running: 'busy', completed: 'good', failed: 'bad', cancelled: 'idle' }

export const Jobs = ({ known, act }) => {
  const { node, jobs } = known
  const sum = `${count(node.jobs.queued)} queued, ${count(node.jobs.running)} running, ${count(node.queued_nonces)} nonces to do`
  return html`<${Section} id="jobs" title="Jobs" beside=${html`<span>${sum}</span>`}>
    ${known.jobProblem && html`<p role="alert" class="problem">${known.jobProblem}</p>`}
    ${jobs.length ? html`<${Table} jobs=${jobs} now=${known.now} act=${act} />` : html`<p>No jobs. One that has ended is kept for some minutes.</p>`}
    <${Submit} node=${node} act=${act} />
  <//>`
}

const Table = ({ jobs, now, act }) => html`<div class="scroll" tabindex="0" role="region" aria-label="Table of jobs">
  <table>
    <thead><tr>
      ${['Job', 'Kind', 'State', 'Nonces', 'Created', 'Took', 'Verdict', 'Do'].map(name => html`<th scope="col" key=${name}>${name}</th>`)}
    </tr></thead>
    <tbody>${jobs.map(job => html`<${Row} key=${job.id} job=${job} now=${now} act=${act} />`)}</tbody>
  </table>
</div>`

const Row = ({ job, now, act }) => {
  const short = job.id.slice(0, 8)
  const tried = async doing => {
    try {
      await doing()
      act.change({ jobProblem: '' })
    } catch (error) {
      act.change({ jobProblem: error.message })
    }
  }
  const done = job.status === 'completed' && job.kind === 'generate' && job.spec.scheme === 'artifact' && job.n_total <= MOST_NONCES
  return html`<tr>
    <th scope="row"><code title=${job.id}>${short}</code></th>
    <td>${job.kind}</td>
    <td><${Chip} kind=${KINDS[job.status]}>${job.status}<//>${job.waiting_for && html` <small>waits for ${job.waiting_for}</small>`}</td>
    <td>${count(job.n_done)} of ${count(job.n_total)}
      ${!job.finished_at && html` <progress max=${job.n_total} value=${job.n_done} aria-label="Progress of job ${short}"></progress>`}</td>
    <td>${clock(job.created_at)}</td>
    <td>${job.started_at ? duration((job.finished_at ?? now) - job.started_at) : '–'}</td>
    <td>${job.error ? html`<span class="problem">${job.error}</span>` : verdict(job.verdict)}</td>
    <td>
      ${done && html`<button onClick=${() => tried(() => act.validateJob(job))} aria-label="Validate job ${short}">Validate</button>`}
      ${!job.finished_at && html`<button onClick=${() => tried(() => act.cancelJob(job.id))} aria-label="Cancel job ${short}">Cancel</button>`}
    </td>
  </tr>`
}

const verdict = found => {
  if (!found) return '–'
  const wrong = found.n_mismatch ?? found.n_invalid
  return html`<${Chip} kind=${found.fraud_detected ? 'bad' : 'good'}>${found.fraud_detected ? 'fraud' : 'honest'}<//>${' '}
    <small>${count(wrong)} of ${count(found.n_total)} differ${found.distances && html`<br />${distances(found)}`}${found.likely_cause && html`<br />${found.likely_cause}`}</small>`
}

const distances = ({ distances: { min, median, max }, dist_threshold: threshold }) =>
  `distances ${min.toFixed(4)} to ${max.toFixed(4)}, median ${median.toFixed(4)}; threshold ${threshold}`

const Submit = ({ node, act }) => {
  const models = Object.entries(node.models)
  if (!models.length) return html`<p>A job can be sent when a worker is ready.</p>`
  const longest = Math.min(...models.map(([, info]) => info.max_seq_len))
  return html`<details>
    <summary>Send a small job</summary>
    <${Form} id="submit" verb="Send the job" submit=${act.submitJob} fields=${[
      ['model', 'Model', models.map(([name]) => name)],
      ['nonces', 'Nonces', 'text', '0-15', 'numbers and ranges: 0-15, 99'],
      ['block_hash', 'Block hash', 'text', 'console'],
      ['public_key', 'Public key', 'text', 'console'],
      ['seq_len', 'Length of a nonce', 'number', String(Math.min(64, longest)), `at most ${longest}`],
      ['k_dim', 'k_dim', 'number', '12'],
    ]} />
  </details>`
}
