// What the page asks before it goes on.
import { html } from './html.js'
import { Dialog } from './parts.js'

export const KeyDialog = ({ known, act }) => {
  const close = () => act.change({ dialog: null })
  const use = event => {
    event.preventDefault()
    act.useKey(new FormData(event.target).get('key').trim())
  }
  return html`<${Dialog} title="This node asks for a key" close=${close}>
    <p>${known.hasKey ? known.refusal : 'Its operator makes one with proofline key new. A read-only key is enough to look.'}</p>
    <form onSubmit=${use}>
      <div class="field">
        <label for="key">API key</label>
        <input id="key" name="key" type="password" required autocomplete="off" />
        <small>Kept in this tab until it is closed.</small>
      </div>
      <p class="buttons"><button class="main">Use it</button><button type="button" onClick=${close}>Not now</button></p>
    </form>
  <//>`
}

export const StopDialog = ({ known, act }) => {
  const close = () => act.change({ dialog: null })
  const stop = async () => {
    close()
    document.getElementById('main').focus() // as the button that opened this goes with the round
    try {
      await act.stopRound()
      act.change({ stopProblem: '' })
    } catch (error) {
      act.change({ stopProblem: error.message })
    }
  }
  const queued = known.node.jobs.queued
  return html`<${Dialog} title="Stop the round?" close=${close}>
    <p>It cannot be started again. What it has computed is still delivered.${' '}
      ${queued ? `The ${queued} queued jobs are cancelled too, but for those whose clients wait.` : ''}</p>
    <p class="buttons">
      <button class="danger" onClick=${stop}>Stop the round</button>
      <button onClick=${close}>Let it run</button>
    </p>
  <//>`
}
