// A histogram of the distances between two nodes' vectors, with the threshold as a line.
import { count } from './format.js'
import { html } from './html.js'

// Upper bound of the last step, which also counts all larger distances.
const LAST = 2
const [WIDTH, HEIGHT, FOOT] = [44, 120, 44]

/** `pairs`: [d, n] for each step: n distances are at most d and larger than the d of the pair before. */
export const Histogram = ({ pairs, threshold }) => {
  const most = Math.max(...pairs.map(([, n]) => n))
  const over = pairs.filter(([d]) => d > threshold).reduce((sum, [, n]) => sum + n, 0)
  const told = `${count(over)} distances are in steps above the threshold of ${threshold}, ${count(pairs.reduce((sum, [, n]) => sum + n, 0) - over)} are not.`
  const width = WIDTH * pairs.length + 8
  const first = pairs.findIndex(([d]) => d > threshold)
  const line = 4 + WIDTH * (first < 0 ? pairs.length : first)
  return html`<figure class="histogram">
    <figcaption>${told}</figcaption>
    <svg viewBox="-16 -8 ${width + 32} ${HEIGHT + FOOT + 8}" role="img" aria-label="Histogram of distances. ${told}">
      ${pairs.map(([d, n], i) => {
        const height = n ? Math.max(2, (HEIGHT - 16) * (n / most)) : 0
        return html`<g key=${d}>
          <rect class=${d > threshold ? 'over' : 'under'} x=${6 + WIDTH * i} y=${HEIGHT - height} width=${WIDTH - 4} height=${height} />
          <text x=${4 + WIDTH * (i + 0.5)} y=${HEIGHT - height - 4}>${n || ''}</text>
          <text class=${(pairs.length - i) % 2 ? '' : 'second'} x=${4 + WIDTH * (i + 0.5)} y=${HEIGHT + 16}>${d === LAST ? 'more' : d}</text>
        </g>`
      })}
      <line x1=${line} x2=${line} y1="0" y2=${HEIGHT} />
      <text x=${width / 2} y=${HEIGHT + 38}>distance at most; the line is the threshold</text>
    </svg>
  </figure>`
}
