// What receivers still have to get.
import { count, duration, size } from './format.js'
import { html } from './html.js'
import { Facts, Section } from './parts.js'

export const Delivery = ({ known: { round, callbacks, now } }) => html`<${Section} id="delivery" title="Delivery">
  ${round && html`<${Outbox} round=${round} now=${now} />`}
  <${Facts} of=${[
    ['Rounds and jobs whose receiver lacks something', count(callbacks.waiting)],
    ['Jobs with a receiver under way', count(callbacks.jobs)],
  ]} />
  ${callbacks.silent.length > 0 && html`<h3>Receivers that do not answer</h3>
    <ul>${callbacks.silent.map(({ receiver, failures, next_try_at }) => html`<li key=${receiver}>
      <code>${receiver}</code>: ${count(failures)} tries in a row, the next ${next_try_at > now ? `in ${duration(next_try_at - now)}` : 'now'}
    </li>`)}</ul>`}
<//>`

const Outbox = ({ round, now }) => {
  const { outbox } = round
  if (!round.config.url && !round.config.callback_url) return html`<p>The round has no receiver: its artifacts are counted and not kept.</p>`
  return html`
    ${outbox.last_error && outbox.failures > 0 && html`<p class="problem">The receiver did not take the last payload: ${outbox.last_error}</p>`}
    <${Facts} of=${[
      ['Receiver of the round', round.config.url ?? round.config.callback_url],
      ['Delivered', count(round.artifacts_delivered)],
      ['Waiting', `${count(round.artifacts_waiting)} (${size(outbox.bytes)} of ${size(outbox.limit_bytes)} that may)`],
      ['Given up', outbox.dropped ? count(outbox.dropped) : null],
      ['Tries in a row that failed', outbox.failures ? count(outbox.failures) : null],
      ['Next try', outbox.next_try_at && outbox.failures ? `in ${duration(outbox.next_try_at - now)}` : null],
    ]} />`
}
