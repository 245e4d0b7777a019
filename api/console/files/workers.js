// The table of workers, and a drawer with one worker's details.
import { Component } from './vendor/preact.mjs'
import { askJson } from './api.js'
import { count, duration, moment, rate } from './format.js'
import { html } from './html.js'
import { Chip, Dialog, Facts, Section, Table } from './parts.js'
import { median } from './past.js'

const KINDS = { ready: 'good', starting: 'busy', draining: 'busy', hung: 'bad', silent: 'bad', ended: 'bad', 'given up': 'bad' }
const COLUMNS = ['Worker', 'State', 'GPU', 'Use', 'Memory', 'Temp.', 'Nonces/s', 'vs. median', 'Restarts', 'Last exit']
// Deviation of a worker's rate from the median below which the worker is shown as slow.
const SLOW = -0.15
const LOOK_MS = 2000

export const Workers = ({ known, act }) => {
  const { workers, rates, figures } = known
  const middle = median(workers.map(({ name }) => rates[name] ?? 0).filter(one => one > 0))
  return html`<${Section} id="workers" title="Workers" beside=${html`<span id="n-ready">${figures.ready} of ${figures.workers} ready</span>`}>
    ${workers.length
      ? html`<${Table} name="Workers" columns=${COLUMNS} rows=${workers.map(worker => [worker.name, cells(worker, known, middle, act)])} />`
      : html`<p>There are no workers. Start some with proofline up or proofline workers.</p>`}
    ${known.drawer && html`<${Drawer} key=${known.drawer} name=${known.drawer} known=${known} close=${() => act.change({ drawer: null })} />`}
  <//>`
}

const cells = (worker, { rates, gpus }, middle, act) => {
  const { name, state } = worker
  const [pace, gpu] = [rates[name] ?? 0, gpus[name]]
  return [
    html`<button class="link" onClick=${() => act.change({ drawer: name })}>${name}</button>`,
    html`<${Chip} kind=${KINDS[state]}>${state}<//>`,
    short(worker.gpus),
    gpu ? told(gpu.use, ' %') : '–',
    gpu ? `${gibibytes(gpu.used_mb)} of ${gibibytes(gpu.total_mb)} GiB` : '–',
    gpu ? told(gpu.celsius, ' °C') : '–',
    rate(pace),
    state === 'ready' ? deviation(pace, middle) : '–',
    worker.restarts === null ? '–' : count(worker.restarts),
    worker.last_exit ? `${worker.last_exit}, ${moment(worker.last_exit_at)}` : '–',
  ]
}

const deviation = (pace, middle) => {
  if (!pace || !middle) return '–'
  const part = pace / middle - 1
  const text = `${part < -0.005 ? '−' : part > 0.005 ? '+' : ''}${Math.abs(Math.round(100 * part))} %`
  return part < SLOW ? html`<span class="problem">${text}</span>` : text
}

/** Shortens a list of GPUs: "0: NVIDIA H100 80GB HBM3" twice -> "2 × H100 80GB HBM3". */
const short = gpus => {
  const models = gpus.map(gpu => gpu.replace(/^\d+: (NVIDIA )?/, ''))
  const kinds = [...new Set(models)]
  return kinds.map(kind => {
    const n = models.filter(one => one === kind).length
    return n > 1 ? `${n} × ${kind}` : kind
  }).join(', ') || '–'
}

const told = (n, unit) => (n === null || n === undefined ? '–' : `${count(n)}${unit}`)
const gibibytes = mb => (mb / 1024).toFixed(mb < 10240 ? 1 : 0)

/** A worker's log and counters. They are fetched only while the drawer is open, because they are large. */
class Drawer extends Component {
  state = { found: null, problem: '' }

  componentDidMount() {
    const look = async () => {
      try {
        const found = await askJson(`api/v1/console/worker?name=${encodeURIComponent(this.props.name)}`)
        this.setState({ found, problem: '' })
      } catch (error) {
        this.setState({ problem: error.message })
      }
      if (!this.gone) this.later = setTimeout(look, LOOK_MS)
    }
    look()
  }

  componentWillUnmount() {
    this.gone = true
    clearTimeout(this.later)
  }

  render({ name, known, close }, { found, problem }) {
    const worker = known.workers.find(one => one.name === name)
    return html`<${Dialog} title=${name} kind="drawer" close=${close}>
      <p class="buttons"><button onClick=${close}>Close</button></p>
      ${worker ? html`<${About} worker=${worker} stats=${found?.stats ?? {}} now=${known.now} />` : html`<p>This worker has ended.</p>`}
      ${problem && html`<p role="alert" class="problem">${problem}</p>`}
      <h3>Last log lines</h3>
      <pre tabindex="0" role="region" aria-label="Log of ${name}">${found ? found.lines.join('\n') || 'No log: the worker has no supervisor, or has written nothing.' : '…'}</pre>
    <//>`
  }
}

const About = ({ worker, stats, now }) => {
  const { info } = worker
  return html`<${Facts} of=${[
    ['State', worker.since === null ? worker.state : `${worker.state}, for ${duration(now - worker.since)}`],
    ['Given up', worker.gave_up],
    ['Restarts', worker.restarts],
    ['Last exit', worker.last_exit && `${worker.last_exit}, ${moment(worker.last_exit_at)}`],
    ['GPUs', worker.gpus.join(', ') || 'none'],
    ['Model', info && `${worker.model} (${worker.engine}, ${info.dtype})`],
    ['Micro-batch', info && `${count(info.max_batch_tokens)} tokens; a nonce has ${count(info.max_seq_len)} at most`],
    ['Chat', stats.chat_total === undefined ? null : `${count(stats.chat_active)} now, ${count(stats.chat_total)} in all, ${count(stats.chat_refused)} refused`],
    ['Chats validated', stats.validations_pass === undefined ? null : `${count(stats.validations_pass)} in one pass, ${count(stats.validations_steps)} by steps`],
    ['Waited for chat', stats.skips === undefined ? null : count(stats.skips)],
    ['Engine time of proofs', stats.proof_busy_s === undefined ? null : duration(stats.proof_busy_s)],
    ['Process', worker.pid && `${worker.pid}; this start is ${worker.id}`],
  ]} />`
}
