// Describes changes of the node's state in sentences, for screen readers.
import { plural } from './format.js'

const ROUND = { GENERATING: 'A round generates.', VALIDATING: 'The round validates.', STOPPED: 'The round has stopped.' }

/** Returns sentences about what has changed, or ''. `before`: the sections known so far; `found`: the sections that have changed. */
export function changes(before, found) {
  const told = []
  if (before.link === 'lost') told.push('The node answers again.')
  if (found.problem && found.problem !== before.problem) told.push(found.problem)
  if (!before.node) return told.join(' ') // the first look: everything is new
  if (found.health && found.health.level !== before.health.level) told.push(`The node is ${found.health.level}: ${found.health.reasons.map(({ what, more }) => what + more).join('; ') || 'all is well'}.`)
  if (found.node && found.node.state !== before.node.state) told.push(ROUND[found.node.state] ?? '')
  if (found.figures && found.figures.ready !== before.figures.ready) told.push(`${plural(found.figures.ready, 'worker')} ready.`)
  for (const one of found.work ?? []) {
    const earlier = before.work.find(({ id }) => id === one.id)
    if (earlier && earlier.status !== one.status && one.finished_at && one.kind !== 'round') told.push(`A job ${one.status}.`)
  }
  return [...new Set(told)].join(' ').trim()
}
