// The list of jobs and rounds, the newest first, with filters. Each line links to the page of its job or round.
import { MOST_NONCES } from './actions.js'
import { clock, count, duration, moment } from './format.js'
import { html } from './html.js'
import { Chip, Choice, Section, Table } from './parts.js'
import { toWork } from './route.js'

export const KINDS = {
  queued: 'idle', running: 'busy', completed: 'good', failed: 'bad', cancelled: 'idle',
  idle: 'idle', generating: 'good', validating: 'busy', stopped: 'idle',
}
const COLUMNS = ['Job or round', 'Kind', 'State', 'Nonces', 'Created', 'Duration', 'Verdict', 'Actions']
const WHAT = [['', 'all kinds'], ['generate', 'generate'], ['validate', 'validate'], ['round', 'rounds']]
const HOW = [['', 'all states'], ['active', 'not ended'], ['failed', 'failed'], ['fraud', 'fraud']]
const FEW = 12

export const Work = ({ known, act }) => {
  const { work, shownWork: shown, figures } = known
  const listed = work.filter(one => fits(one, shown))
  const rows = shown.all ? listed : listed.slice(0, FEW)
  const set = what => act.change({ shownWork: { ...shown, ...what } })
  const sum = `${count(figures.jobs.queued)} queued, ${count(figures.jobs.running)} running`
  return html`<${Section} id="work" title="Jobs and rounds" beside=${html`<${Buttons} known=${known} act=${act} />`}>
    <div class="filters">
      <${Choice} label="Kind" value=${shown.kind} choices=${WHAT} choose=${kind => set({ kind })} />
      <${Choice} label="State" value=${shown.state} choices=${HOW} choose=${state => set({ state })} />
      <label class="filter">Find <input type="search" value=${shown.text} placeholder="id or model" onInput=${event => set({ text: event.target.value })} /></label>
      <span id="jobs-sum">${sum}</span>
    </div>
    ${known.jobProblem && html`<p role="alert" class="problem">${known.jobProblem}</p>`}
    ${rows.length
      ? html`<${Table} name="Jobs and rounds" columns=${COLUMNS} rows=${rows.map(one => [one.id, cells(one, known.now, act)])} />`
      : html`<p>${work.length ? 'No job or round matches the filters.' : 'There are no jobs or rounds. Ended ones are kept for a limited time.'}</p>`}
    ${rows.length < listed.length && html`<button onClick=${() => set({ all: true })}>Show all ${listed.length}</button>`}
  <//>`
}

const Buttons = ({ known, act }) => {
  const runs = ['GENERATING', 'VALIDATING'].includes(known.node.state)
  const can = Object.keys(known.node.models).length > 0
  const why = can ? '' : 'No worker is ready.'
  return html`<span class="buttons">
    ${runs
      ? html`<button class="danger" onClick=${() => act.change({ dialog: 'stop' })}>Stop the round …</button>`
      : html`<button disabled=${!can} title=${why} onClick=${() => act.change({ dialog: 'round' })}>Start a round …</button>`}
    <button disabled=${!can} title=${why} onClick=${() => act.change({ dialog: 'job' })}>Send a small job …</button>
  </span>`
}

const isActive = one => one.finished_at === null && one.status !== 'stopped'

const fits = (one, { kind, state, text }) =>
  (!kind || one.kind === kind) &&
  (!state || (state === 'active' ? isActive(one) : state === 'fraud' ? one.verdict?.fraud_detected : one.status === state)) &&
  (!text || `${one.id} ${one.model}`.includes(text.trim()))

const cells = (one, now, act) => {
  const short = one.id.slice(0, 8)
  return [
    html`<a href=${toWork(one.id)}><code title=${one.id}>${short}</code></a>`,
    one.kind,
    html`<${Chip} kind=${KINDS[one.status]}>${one.status}<//>${one.waiting_for && html` <small>waits for ${one.waiting_for}</small>`}`,
    one.kind === 'round' ? count(one.n_done) : html`${count(one.n_done)} of ${count(one.n_total)}
      ${isActive(one) && html` <progress max=${one.n_total} value=${one.n_done} aria-label="Progress of job ${short}"></progress>`}`,
    moment(one.created_at),
    one.started_at ? duration((one.finished_at ?? now) - one.started_at) : '–',
    one.error ? html`<span class="problem clipped" title=${one.error}>${one.error}</span>` : html`<${Verdict} found=${one.verdict} />`,
    html`<${Do} one=${one} act=${act} />`,
  ]
}

export const Do = ({ one, act }) => {
  const short = one.id.slice(0, 8)
  const tried = async doing => {
    try {
      await doing()
      act.change({ jobProblem: '' })
    } catch (error) {
      act.change({ jobProblem: error.message })
    }
  }
  if (one.kind === 'round') return ''
  const done = one.status === 'completed' && one.kind === 'generate' && one.spec.scheme === 'artifact' && one.n_total <= MOST_NONCES
  return html`
    ${done && html`<button onClick=${() => tried(() => act.validateJob(one))} aria-label="Validate job ${short}">Validate</button>`}
    ${isActive(one) && html`<button onClick=${() => tried(() => act.cancelJob(one.id))} aria-label="Cancel job ${short}">Cancel</button>`}`
}

export const Verdict = ({ found }) => {
  if (!found) return '–'
  const wrong = found.n_mismatch ?? found.n_invalid
  return html`<${Chip} kind=${found.fraud_detected ? 'bad' : 'good'}>${found.fraud_detected ? 'fraud' : 'honest'}<//>${' '}
    <small>${count(wrong)} of ${count(found.n_total)} differ</small>`
}
