// Dialogs: keys, rounds, jobs, Grafana's address.
import { grafana } from './links.js'
import { html } from './html.js'
import { Dialog, Form } from './parts.js'

export const Dialogs = ({ known, act }) => {
  const close = () => act.change({ dialog: null })
  const One = { key: KeyDialog, stop: StopDialog, round: RoundDialog, job: JobDialog, grafana: GrafanaDialog }[known.dialog]
  return One ? html`<${One} known=${known} act=${act} close=${close} />` : null
}

const KeyDialog = ({ known, act, close }) => {
  const use = event => {
    event.preventDefault()
    act.useKey(new FormData(event.target).get('key').trim())
  }
  return html`<${Dialog} title="This node requires a key" close=${close}>
    <p>${known.hasKey ? known.refusal : 'Make a key with proofline key new NAME --role read-only. The role proofs can also start and stop rounds.'}</p>
    <form onSubmit=${use}>
      <div class="field">
        <label for="key">API key</label>
        <input id="key" name="key" type="password" required autocomplete="off" />
        <small>The key is kept until this tab is closed.</small>
      </div>
      <p class="buttons"><button class="main">Use key</button><button type="button" onClick=${close}>Not now</button></p>
    </form>
  <//>`
}

const StopDialog = ({ known, act, close }) => {
  const stop = async () => {
    close()
    document.getElementById('main').focus() // as the button that opened this goes with the round
    try {
      await act.stopRound()
      act.change({ jobProblem: '' })
    } catch (error) {
      act.change({ jobProblem: error.message })
    }
  }
  const queued = known.figures.jobs.queued
  return html`<${Dialog} title="Stop the round?" close=${close}>
    <p>A stopped round cannot continue. Its artifacts are still delivered.${' '}
      ${queued ? `The ${queued} queued jobs are cancelled too, except those whose clients wait.` : ''}</p>
    <p class="buttons">
      <button class="danger" onClick=${stop}>Stop the round</button>
      <button onClick=${close}>Keep it running</button>
    </p>
  <//>`
}

const RoundDialog = ({ known, act, close }) => html`<${Dialog} title="Start a round" close=${close}>
  <${Form} id="start" verb="Start the round" submit=${act.startRound} done=${close} fields=${[
    ...common(known.node, 256),
    ['block_height', 'Block height', 'number', '1'],
    ['node_id', 'Node id', 'number', '0', 'from 0 to the number of nodes - 1'],
    ['node_count', 'Number of nodes', 'number', '1'],
    ['url', 'Receiver', 'url', '', 'empty: no callbacks'],
  ]} />
<//>`

const JobDialog = ({ known, act, close }) => html`<${Dialog} title="Send a small job" close=${close}>
  <${Form} id="submit" verb="Send the job" submit=${act.submitJob} done=${close} fields=${[
    ['nonces', 'Nonces', 'text', '0-15', 'numbers and ranges: 0-15, 99'],
    ...common(known.node, 64),
  ]} />
<//>`

const common = ({ models }, usual) => {
  const longest = Math.min(...Object.values(models).map(info => info.max_seq_len))
  return [
    ['model', 'Model', Object.keys(models)],
    ['block_hash', 'Block hash', 'text', 'console'],
    ['public_key', 'Public key', 'text', 'console'],
    ['seq_len', 'seq_len', 'number', String(Math.min(usual, longest)), `at most ${longest}`],
    ['k_dim', 'k_dim', 'number', '12'],
  ]
}

const GrafanaDialog = ({ act, close }) => html`<${Dialog} title="Grafana's address" close=${close}>
  <${Form} id="grafana" verb="Save" submit=${({ url }) => act.useGrafana(url)} done=${close} fields=${[
    ['url', 'Address', 'url', grafana() ?? '', 'https://grafana.example.org; kept in this browser; empty: no link'],
  ]} />
<//>`
