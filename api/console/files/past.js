// The shown range of the node's history, to which completed steps are added.
export const RANGES = [[5, '15 min'], [20, '1 h'], [120, '6 h'], [480, '24 h']]
const SHOWN = 180
const COLUMNS = ['chats', 'failed', 'active', 'first_token']

/** Adds the new steps `told` to the history `past`, and drops the oldest steps. Returns null if steps are missing between the two, or have another length. */
export function joined(past, told) {
  if (past.step_s !== told.step_s) return null
  const n = Math.round((told.first - past.first) / past.step_s) // steps of `past` that stay
  if (n < 0 || n > SHOWN) return null
  const column = (old, fresh) => [...(old ?? Array(SHOWN).fill(0)).slice(0, n), ...fresh]
  const size = told.chats.length
  const drop = Math.max(0, n + size - SHOWN)
  const cut = values => values.slice(drop)
  const names = [...new Set([...Object.keys(past.workers), ...Object.keys(told.workers)])].sort(byName)
  const workers = {}
  for (const name of names) {
    const values = cut(column(past.workers[name], told.workers[name] ?? Array(size).fill(0)))
    if (values.some(value => value > 0)) workers[name] = values
  }
  return {
    step_s: past.step_s,
    first: past.first + drop * past.step_s,
    workers,
    ...Object.fromEntries(COLUMNS.map(name => [name, cut(column(past[name], told[name]))])),
  }
}

export const byName = (a, b) => a.localeCompare(b, 'en', { numeric: true })

/** Returns the end of each step in seconds since the epoch. */
export const times = past => past.chats.map((_, i) => past.first + (i + 1) * past.step_s)

/** Returns the nonces per second of all workers together, for each step. */
export const totals = past =>
  Object.values(past.workers).reduce((sums, values) => sums.map((sum, i) => sum + values[i]), past.chats.map(() => 0))

const OF_ANY_FALL = 0.7
const LOOKED_AT = 12

/** Describes a drop of the rate and its probable cause; returns '' if the rate has not dropped. `marks`: events, the newest first. `works`: false without a running round or queued nonces. */
export function fall(past, marks, round, works) {
  const sums = totals(past)
  const now = mean(sums.slice(-2))
  const before = median(sums.slice(-2 - LOOKED_AT, -2).filter(sum => sum > 0))
  if (!before || now >= OF_ANY_FALL * before) return ''
  let start = sums.length
  while (start > sums.length - 2 - LOOKED_AT && sums[start - 1] < OF_ANY_FALL * before) start--
  const from = past.first + start * past.step_s
  const chats = mean(past.active.slice(start))
  const near = marks.find(({ at }) => at > from - 2 * past.step_s - 5 && at < from + past.step_s + 5)
  const why = [
    near && near.text,
    chats >= 0.2 && `chat had the engine: ${chats.toFixed(1)} requests under way in the mean`,
    round?.outbox.full && 'the round waits for its receiver',
    !works && 'no round or job is running',
  ].filter(Boolean)
  return { from, before, now, why: why.join('; ') || 'no chat or event explains it' }
}

export const mean = values => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : 0)
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b)
  const middle = sorted.length >> 1
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2 || 0
}
