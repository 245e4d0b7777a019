// The chart by uPlot: nonces a second by worker, running chats, and events; also in words and numbers.
import { Component, createRef } from './vendor/preact.mjs'
import { endsTrouble } from './events.js'
import { clock, count, rate, seconds } from './format.js'
import { html } from './html.js'
import { RANGES, fall, mean, times, totals } from './past.js'
import { Section } from './parts.js'

const HEIGHTS = { nonces: 200, chat: 90 }
const MARKED = { worker: '--bad', deployment: '--accent', round: '--good' }
// Most workers that the readout at the pointer lists one by one.
const MOST_NAMED = 8
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()

export const Chart = ({ known, act }) => {
  const { past, log } = known
  const marks = past ? log.filter(({ kind, at }) => MARKED[kind] && at >= past.first) : []
  const choose = html`<span class="choice" role="group" aria-label="Time shown">${RANGES.map(
    ([step, name]) =>
      html`<button key=${step} aria-pressed=${String(step === known.step)} onClick=${() => act.useRange(step)}>${name}</button>`,
  )}</span>`
  return html`<${Section} id="chart" title="Nonces per second and chat" beside=${choose}>
    ${past ? html`<${Told} past=${past} marks=${marks} round=${known.round} works=${known.node.state === 'GENERATING' || known.figures.queued_nonces > 0} theme=${known.theme} />` : html`<div class="chart-room"></div>`}
  <//>`
}

class Told extends Component {
  state = { at: null }
  tell = at => this.state.at !== at && this.setState({ at })

  render({ past, marks, round, works, theme }, { at }) {
    const sums = totals(past)
    const range = RANGES.find(([step]) => step === past.step_s)[1]
    const words = `Nonces per second, the last ${range}: now ${rate(sums.at(-1))}, mean ${rate(mean(sums))}, maximum ${rate(Math.max(...sums))}.`
    const low = fall(past, marks, round, works)
    const place = at === null || at >= sums.length ? sums.length - 1 : at
    return html`<figure class="past">
      <figcaption>${words}</figcaption>
      <p class="fall">${low ? html`<strong>Slower since ${clock(low.from)}</strong>: ${rate(low.now)} instead of ${rate(low.before)}: ${low.why}` : ''}</p>
      <${Plots} past=${past} marks=${marks} theme=${theme} words=${words} tell=${this.tell} />
      <${Readout} past=${past} sums=${sums} place=${place} marks=${marks} />
      <details>
        <summary>Numbers</summary>
        <${Numbers} past=${past} sums=${sums} />
      </details>
    </figure>`
  }
}

const Readout = ({ past, sums, place, marks }) => {
  const end = times(past)[place]
  const named = Object.entries(past.workers).map(([name, values]) => [name, values[place]])
  const few = named.length <= MOST_NAMED
  const sorted = few ? named : [...named].sort((a, b) => a[1] - b[1])
  const shown = few ? sorted : [...sorted.slice(0, 3), ...sorted.slice(-3)]
  const near = marks.filter(({ at }) => at > end - past.step_s && at <= end)
  const first = past.first_token[place]
  return html`<div class="readout">
    <p><strong>${clock(end - past.step_s)} to ${clock(end)}</strong>: ${rate(sums[place])} nonces/s;
      chat: ${count(past.chats[place])} begun, ${rate(past.active[place])} under way${first ? `, first token in ${seconds(first)}` : ''}${past.failed[place] ? `, ${count(past.failed[place])} failed` : ''}</p>
    <p>${few ? '' : `${named.length} workers, the slowest and fastest: `}${shown.map(([name, value]) => `${name} ${rate(value)}`).join(', ')}</p>
    <p>${near.map(({ text }) => text).join(' ')}</p>
  </div>`
}

const Numbers = ({ past, sums }) => {
  const ends = times(past)
  const every = Math.max(1, Math.round(sums.length / 15))
  const rows = []
  for (let i = sums.length; i > 0; i -= every) {
    const first = Math.max(0, i - every)
    rows.push([ends[first] - past.step_s, mean(sums.slice(first, i)), mean(past.active.slice(first, i))])
  }
  return html`<table>
    <thead><tr><th scope="col">From</th><th scope="col">Nonces per second</th><th scope="col">Running chats</th></tr></thead>
    <tbody>${rows.map(([at, nonces, chats]) => html`<tr key=${at}><td>${clock(at)}</td><td>${rate(nonces)}</td><td>${rate(chats)}</td></tr>`)}</tbody>
  </table>`
}

class Plots extends Component {
  nonces = createRef()
  chat = createRef()
  plots = []

  componentDidMount() {
    this.draw()
    this.resized = new ResizeObserver(() => this.plots.forEach(({ plot, height }) => plot.setSize({ width: this.width(), height })))
    this.resized.observe(this.nonces.current)
    this.dark = matchMedia('(prefers-color-scheme: dark)')
    this.redraw = () => this.draw()
    this.dark.addEventListener('change', this.redraw)
  }

  componentWillUnmount() {
    this.resized.disconnect()
    this.dark.removeEventListener('change', this.redraw)
    this.plots.forEach(({ plot }) => plot.destroy())
  }

  shouldComponentUpdate(next) {
    return next.past !== this.props.past || next.marks.length !== this.props.marks.length || next.theme !== this.props.theme
  }

  componentDidUpdate(before) {
    const same = names(before.past) === names(this.props.past) && before.past.step_s === this.props.past.step_s
    if (!same || before.theme !== this.props.theme) return this.draw()
    const [nonces, chat] = this.data()
    this.plots[0].plot.setData(nonces)
    this.plots[1].plot.setData(chat)
  }

  /** Returns the data of both plots. The nonces' series are sums over the first workers, the sum of all first, because each series is drawn over the series before it. */
  data() {
    const { past } = this.props
    const ends = times(past)
    const sums = []
    let below = ends.map(() => 0)
    for (const values of Object.values(past.workers)) {
      below = values.map((value, i) => value + below[i])
      sums.unshift(below)
    }
    return [[ends, ...(sums.length ? sums : [below])], [ends, past.active]]
  }

  width() {
    return Math.max(200, this.nonces.current.clientWidth)
  }

  draw() {
    this.plots.forEach(({ plot }) => plot.destroy())
    const axis = { stroke: colour('--quiet'), grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false } }
    const [nonces, chat] = this.data()
    const n = nonces.length - 1
    const layers = Array.from({ length: n }, (_, i) => ({
      stroke: i ? colour('--card') : colour('--accent'),
      fill: shade(n - 1 - i, n),
      width: i ? 0.5 : 1.5,
      points: { show: false },
    }))
    const tell = this.props.tell
    const plot = (place, height, series, data, labels) =>
      new window.uPlot(
        {
          width: this.width(),
          height,
          padding: [10, 16, 0, 0],
          legend: { show: false },
          cursor: { sync: { key: 'past' }, drag: { x: false, y: false }, points: { show: false } },
          scales: { y: { range: (_, __, most) => [0, Math.max(1, most * 1.1)] } },
          axes: [
            { ...axis, values: (_, at) => at.map(one => clock(one).slice(0, this.props.past.step_s > 5 ? 5 : 8)), space: 90, size: labels ? 26 : 4, show: true },
            { ...axis, values: (_, rates) => rates.map(rate), size: 52, space: height < 100 ? 24 : 36 },
          ],
          series: [{}, ...series],
          hooks: { draw: [self => this.mark(self)], setCursor: [({ cursor }) => tell(cursor.idx ?? null)] },
        },
        data,
        place,
      )
    const one = { stroke: colour('--busy'), fill: colour('--chat'), width: 1.5, points: { show: false } }
    this.plots = [
      { plot: plot(this.nonces.current, HEIGHTS.nonces, layers, nonces, false), height: HEIGHTS.nonces },
      { plot: plot(this.chat.current, HEIGHTS.chat, [one], chat, true), height: HEIGHTS.chat },
    ]
  }

  mark({ ctx, bbox, valToPos }) {
    ctx.save()
    ctx.lineWidth = devicePixelRatio
    for (const one of this.props.marks) {
      const x = Math.round(valToPos(one.at, 'x', true))
      if (x < bbox.left || x > bbox.left + bbox.width) continue
      ctx.strokeStyle = ctx.fillStyle = colour(endsTrouble(one) ? '--good' : MARKED[one.kind])
      ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio])
      ctx.beginPath()
      ctx.moveTo(x, bbox.top)
      ctx.lineTo(x, bbox.top + bbox.height)
      ctx.stroke()
      ctx.beginPath()
      ctx.arc(x, bbox.top, 3 * devicePixelRatio, 0, 7)
      ctx.fill()
    }
    ctx.restore()
  }

  render({ words }) {
    return html`<div role="img" aria-label="Chart. ${words}">
      <div class="plot-nonces" ref=${this.nonces}></div>
      <p class="axis">Running chat requests</p>
      <div class="plot-chat" ref=${this.chat}></div>
    </div>
    <p class="legend"><span class="mark-worker">worker ended or returned</span> <span class="mark-deployment">deployment</span> <span class="mark-round">round</span></p>`
  }
}

const names = past => Object.keys(past.workers).join()
/** Returns the colour of series `i` of `n`. Neighbouring series differ on any background. */
const shade = (i, n) => `hsl(${205 + 50 * (n > 1 ? i / (n - 1) : 0)} 55% ${i % 2 ? 52 : 64}%)`
