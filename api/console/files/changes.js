// What changed, as far as somebody who does not see the page would want to be told.
import { plural } from './format.js'

const ROUND = { GENERATING: 'A round generates.', VALIDATING: 'The round validates.', STOPPED: 'The round has stopped.' }

/** Sentences, or ''. `before`: all that was known; `found`: the sections that have changed. */
export function changes(before, found) {
  const told = []
  if (before.link === 'lost') told.push('The node answers again.')
  if (found.problem && found.problem !== before.problem) told.push(found.problem)
  if (!before.node) return told.join(' ') // the first look: everything is new
  if (found.node && found.node.state !== before.node.state) told.push(ROUND[found.node.state] ?? '')
  if (found.workers) {
    const [was, is] = [n_ready(before.workers), n_ready(found.workers)]
    if (was !== is) told.push(`${plural(is, 'worker')} ready.`)
  }
  for (const job of found.jobs ?? []) {
    const earlier = before.jobs.find(({ id }) => id === job.id)
    if (earlier && earlier.status !== job.status && job.finished_at) told.push(`A job ${job.status}.`)
  }
  return [...new Set(told)].join(' ').trim()
}

const n_ready = workers => workers.filter(({ state, is_silent }) => state === 'ready' && !is_silent).length
