// Events, the newest first, filtered by kind.
import { moment } from './format.js'
import { html } from './html.js'
import { Chip, Choice, Section, Table } from './parts.js'
import { toWork } from './route.js'

const KINDS = { worker: 'bad', deployment: 'busy', round: 'good', job: 'bad', receiver: 'bad', refused: 'idle', key: 'idle', node: 'idle' }
const NAMES = [['', 'all'], ['worker', 'workers'], ['deployment', 'deployments'], ['round', 'rounds'], ['job', 'jobs'], ['receiver', 'receivers'], ['refused', 'refused requests'], ['key', 'keys used'], ['node', 'the node']]
const STEP = 15
const OVER = / is ready( again, .*)?\.$| was taken after all\.$/

export const Events = ({ known: { log, shownEvents: shown }, act }) => {
  const listed = shown.kind ? log.filter(({ kind }) => kind === shown.kind) : log
  const rows = listed.slice(0, shown.n)
  const set = what => act.change({ shownEvents: { ...shown, ...what } })
  return html`<${Section} id="events" title="Events" beside=${html`<${Choice} label="Kind" value=${shown.kind} choices=${NAMES} choose=${kind => set({ kind, n: STEP })} />`}>
    ${rows.length
      ? html`<${Table} name="Events" columns=${['When', 'Kind', 'What happened']} rows=${rows.map(one => [`${one.at} ${one.text}`, [
          moment(one.at), html`<${Chip} kind=${endsTrouble(one) ? 'good' : KINDS[one.kind]}>${one.kind}<//>`, html`<${Told} one=${one} />`,
        ]])} />`
      : html`<p>There are no such events.</p>`}
    ${rows.length < listed.length && html`<button onClick=${() => set({ n: shown.n + 4 * STEP })}>Show more of ${listed.length}</button>`}
  <//>`
}

const Told = ({ one: { text, about } }) => (/^[0-9a-f]{32}$/.test(about) ? html`${text} <a href=${toWork(about)}>Its page</a>` : text)

/** Returns true if an event reports the end of a problem. */
export const endsTrouble = ({ kind, text }) => KINDS[kind] === 'bad' && OVER.test(text)

/** Adds the events of `found` that `log` lacks. All lists have the newest event first. */
export function merged(log, found) {
  const known = new Set(log.map(key))
  const fresh = found.filter(one => !known.has(key(one)))
  return fresh.length ? [...fresh, ...log].sort((a, b) => b.at - a.at).slice(0, 1000) : log
}

const key = ({ at, kind, text }) => `${at} ${kind} ${text}`
