// The page of one job or round. Its details are fetched repeatedly while the job or round runs.
import { Component } from './vendor/preact.mjs'
import { askJson } from './api.js'
import { count, duration, moment, size } from './format.js'
import { Histogram } from './histogram.js'
import { html } from './html.js'
import { Chip, Facts, Section, Table } from './parts.js'
import { Do, KINDS, Verdict } from './work.js'

const LOOK_MS = 2000

export class WorkPage extends Component {
  state = { found: null, problem: '' }

  componentDidMount() {
    const look = async () => {
      try {
        this.setState({ found: await askJson(`api/v1/console/work/${this.props.id}`), problem: '' })
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

  render({ known, act }, { found, problem }) {
    return html`<p class="back"><a href="#/">Back to the overview</a></p>
      ${problem && html`<p role="alert" class="problem">${problem}</p>`}
      ${known.jobProblem && html`<p role="alert" class="problem">${known.jobProblem}</p>`}
      ${found ? html`<${Found} one=${found} now=${known.now} act=${act} />` : !problem && html`<p>Reading …</p>`}`
  }
}

const Found = ({ one, now, act }) => {
  const took = one.started_at && (one.finished_at ?? now) - one.started_at
  const chip = html`<${Chip} kind=${KINDS[one.status]}>${one.status}<//>`
  return html`<${Section} id="about" title=${one.kind === 'round' ? 'Round' : one.kind === 'validate' ? 'Validation' : 'Job'} beside=${chip}>
      <p><code>${one.id}</code></p>
      ${one.error && html`<p class="problem">${one.error}</p>`}
      ${one.waiting_for && html`<p>It waits for ${one.waiting_for}.</p>`}
      <${Facts} of=${[
        ['Nonces', one.n_total ? `${count(one.n_done)} of ${count(one.n_total)}, in ${count(one.n_batches)} batches` : `${count(one.n_done)} computed, ${count(one.n_reported)} reported`],
        ['Without a finite output', one.n_excluded ? count(one.n_excluded) : null],
        ['Created', moment(one.created_at)],
        ['Started', one.started_at ? moment(one.started_at) : 'not yet'],
        ['Ended', one.finished_at ? moment(one.finished_at) : 'not yet'],
        ['Took', took ? `${duration(took)}, ${(one.n_done / Math.max(1, took)).toFixed(1)} nonces/s` : null],
      ]} />
      <${Do} one=${one} act=${act} />
    <//>
    ${one.verdict && html`<${Judged} found=${one.verdict} />`}
    <${Section} id="spec" title="Inputs">
      <${Facts} of=${one.spec ? specOf(one) : Object.entries(flat(one.config)).filter(([name]) => !/url$/.test(name))} />
    <//>
    <${Section} id="shares" title="Workers">
      ${Object.keys(one.workers).length
        ? html`<${Table} name="Nonces by worker" columns=${['Worker', 'Nonces', 'Share']} rows=${Object.entries(one.workers).map(([name, n]) => [name, [
            name, count(n), html`<progress max=${Math.max(1, one.n_done)} value=${n} aria-label="Share of ${name}"></progress>`,
          ]])} />`
        : html`<p>No worker has computed a nonce yet.</p>`}
    <//>
    <${Section} id="deliveries" title="Delivery">
      ${one.delivery ? html`<${Delivery} url=${one.url} of=${one.delivery} now=${now} status=${one.status} />` : html`<p>There is no receiver; clients fetch the result.</p>`}
    <//>`
}

const specOf = ({ model, spec, owner }) => [
  ['Model', model],
  ['Scheme', spec.scheme],
  ['Block', `${spec.block_hash} (height ${owner.block_height})`],
  ['Public key', spec.public_key],
  ['seq_len', spec.seq_len],
  ['Node', `${owner.node_id} of ${owner.node_count}`],
  ...Object.entries(spec.options).map(([name, value]) => [name, String(value)]),
]

/** Flattens a configuration: {a: {b: 1}} -> {"a.b": "1"}. */
const flat = (config, before = '') =>
  Object.assign({}, ...Object.entries(config).map(([name, value]) =>
    value !== null && typeof value === 'object' ? flat(value, `${before}${name}.`) : { [before + name]: value === null ? null : String(value) },
  ))

const Judged = ({ found }) => html`<${Section} id="verdict" title="Verdict" beside=${html`<span><${Verdict} found=${found} /></span>`}>
  ${found.likely_cause && html`<p>Likely cause: ${found.likely_cause}</p>`}
  <${Facts} of=${[
    ['p-value', (found.p_value ?? found.probability_honest)?.toExponential(2)],
    ['fraud_threshold', found.fraud_threshold],
    ['Not computed by this node', found.n_excluded ? count(found.n_excluded) : null],
    ['Distances', found.distances && `${found.distances.min.toFixed(4)} to ${found.distances.max.toFixed(4)}, median ${found.distances.median.toFixed(4)}`],
    ['Threshold', found.dist_threshold],
  ]} />
  ${found.distances?.histogram && html`<${Histogram} pairs=${found.distances.histogram} threshold=${found.dist_threshold} />`}
<//>`

const Delivery = ({ url, of, now, status }) => html`
  ${of.last_error && of.failures > 0 && html`<p class="problem">The receiver refused the last payload: ${of.last_error}</p>`}
  <${Facts} of=${[
    ['Receiver', url],
    ['Delivered', of.delivered ? count(of.delivered) : 'nothing yet'],
    ['Waiting', of.waiting ? `${count(of.waiting)} (${size(of.waiting_bytes)})` : status === 'completed' || status === 'stopped' ? 'nothing' : 'nothing now'],
    ['Dropped', of.dropped ? count(of.dropped) : null],
    ['Failed tries in a row', of.failures ? count(of.failures) : null],
    ['Next try', of.next_try_at ? (of.next_try_at > now ? `in ${duration(of.next_try_at - now)}` : 'now') : null],
  ]} />`
