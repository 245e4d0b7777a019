// A round's pace: nonces per second over the last hour, drawn by uPlot and told in words and numbers beside it.
import { Component, createRef } from './vendor/preact.mjs'
import { clock, rate } from './format.js'
import { html } from './html.js'

const HEIGHT = 200
// Between two labels of the time.
const STEPS_S = [5, 10, 15, 30, 60, 120, 300, 600, 900]
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()

export class Pace extends Component {
  place = createRef()

  componentDidMount() {
    this.draw()
    this.resized = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: HEIGHT }))
    this.resized.observe(this.place.current)
    this.dark = matchMedia('(prefers-color-scheme: dark)')
    this.redraw = () => this.draw()
    this.dark.addEventListener('change', this.redraw)
  }

  componentWillUnmount() {
    this.resized.disconnect()
    this.dark.removeEventListener('change', this.redraw)
    this.plot.destroy()
  }

  shouldComponentUpdate(next) {
    return next.pace !== this.props.pace || next.theme !== this.props.theme
  }

  componentDidUpdate(before) {
    if (before.theme !== this.props.theme) this.draw()
    else this.plot.setData(points(this.props.pace))
  }

  width() {
    return Math.max(200, this.place.current.clientWidth)
  }

  draw() {
    this.plot?.destroy()
    const axis = { stroke: colour('--quiet'), grid: { stroke: colour('--line'), width: 1 }, ticks: { show: false } }
    this.plot = new window.uPlot(
      {
        width: this.width(),
        height: HEIGHT,
        padding: [8, 32, 0, 0],
        legend: { show: false },
        cursor: { show: false },
        scales: { y: { range: (_, __, most) => [0, Math.max(1, most * 1.1)] } },
        axes: [
          { ...axis, values: (_, times) => times.map(clock), space: 90, size: 30, incrs: STEPS_S },
          { ...axis, values: (_, rates) => rates.map(rate), size: 56 },
        ],
        series: [{}, { stroke: colour('--accent'), fill: colour('--wash'), width: 2, points: { show: false } }],
      },
      points(this.props.pace),
      this.place.current,
    )
  }

  render({ pace }) {
    const [, rates] = points(pace)
    const mean = rates.length ? rates.reduce((sum, one) => sum + one, 0) / rates.length : 0
    const told = rates.length
      ? `Nonces per second, from ${clock(pace.first)}: last ${rate(rates.at(-1))}, mean ${rate(mean)}, most ${rate(Math.max(...rates))}.`
      : `Nonces per second; the first point comes after ${pace.step_s} seconds.`
    return html`<figure class="pace">
      <figcaption>${told}</figcaption>
      <div ref=${this.place} role="img" aria-label="Line chart. ${told}"></div>
      <details>
        <summary>Minute by minute</summary>
        <table>
          <thead><tr><th scope="col">From</th><th scope="col">Nonces per second</th></tr></thead>
          <tbody>${minutes(pace).map(([at, mean]) => html`<tr key=${at}><td>${clock(at)}</td><td>${rate(mean)}</td></tr>`)}</tbody>
        </table>
      </details>
    </figure>`
  }
}

/** uPlot's data: times, and rates at them. */
const points = ({ first, step_s, counts }) => [
  counts.map((_, i) => first + (i + 1) * step_s),
  counts.map(n => n / step_s),
]

/** [beginning, mean rate] of each minute, the newest first. */
function minutes({ first, step_s, counts }) {
  const found = []
  const steps = 60 / step_s
  for (let i = 0; i < counts.length; i += steps) {
    const here = counts.slice(i, i + steps)
    found.unshift([first + i * step_s, here.reduce((sum, n) => sum + n, 0) / (here.length * step_s)])
  }
  return found
}
