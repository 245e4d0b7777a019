// The actions of the page, most of which change the node. An action throws a Refusal, with a text for people, if the API refuses its request.
import { ask, askJson, send } from './api.js'

const POW = 'api/v1/pow'

export const actions = say => ({
  async startRound(texts) {
    await send(`${POW}/init/generate`, {
      ...owner(texts),
      params: params(texts),
      ...(texts.url ? { url: texts.url } : {}),
    })
  },

  async stopRound() {
    const { cancelled_jobs: n } = await send(`${POW}/stop`)
    if (n) say(`${n} queued jobs are cancelled.`)
  },

  async submitJob(texts) {
    await send(`${POW}/generate`, { ...owner(texts), nonces: nonces(texts.nonces), params: params(texts) })
    say('The job is queued.')
  },

  /** Starts a new job that validates the artifacts of a completed job. */
  async validateJob({ id, model, spec, owner }) {
    const { artifacts } = await askJson(`${POW}/generate/${id}`)
    await send(`${POW}/generate`, {
      ...owner,
      block_hash: spec.block_hash,
      public_key: spec.public_key,
      nonces: artifacts.map(({ nonce }) => nonce),
      params: { model, seq_len: spec.seq_len, k_dim: spec.options.k_dim },
      poc_stronger_rng: spec.options.stronger_rng,
      validation: { artifacts },
    })
    say('The validation is queued.')
  },

  async cancelJob(id) {
    await ask(`${POW}/generate/${id}`, { method: 'DELETE' })
  },

  /** Fetches a page that needs a key and shows it in a new tab, because a link cannot send the key. */
  async open(path) {
    const answer = await ask(path)
    const type = (answer.headers.get('content-type') ?? '').includes('json') ? 'application/json' : 'text/plain'
    const url = URL.createObjectURL(new Blob([await answer.text()], { type }))
    window.open(url, '_blank', 'noopener')
    setTimeout(() => URL.revokeObjectURL(url), 60_000)
  },
})

const owner = texts => ({
  block_hash: texts.block_hash,
  block_height: whole(texts.block_height ?? '0', 'The block height'),
  public_key: texts.public_key,
  node_id: whole(texts.node_id ?? '0', 'The node id'),
  node_count: whole(texts.node_count ?? '1', 'The number of nodes'),
})

const params = texts => ({
  model: texts.model,
  seq_len: whole(texts.seq_len, 'seq_len'),
  k_dim: whole(texts.k_dim, 'k_dim'),
})

function whole(text, what) {
  if (!/^\d{1,15}$/.test(text.trim())) throw new Error(`${what} must be a whole number.`)
  return Number(text)
}

export const MOST_NONCES = 1000

/** Parses a list of nonces and ranges: "0-3, 8" -> [0, 1, 2, 3, 8]. */
export function nonces(text) {
  const found = new Set()
  for (const part of text.split(',')) {
    const match = /^\s*(\d{1,15})(?:\s*-\s*(\d{1,15}))?\s*$/.exec(part)
    if (!match) throw new Error('Nonces are numbers and ranges, such as 0-15, 99.')
    const [first, last] = [Number(match[1]), Number(match[2] ?? match[1])]
    if (last < first || last - first >= MOST_NONCES) throw new Error(`A job from the console has 1 to ${MOST_NONCES} nonces.`)
    for (let nonce = first; nonce <= last; nonce++) found.add(nonce)
  }
  if (found.size > MOST_NONCES) throw new Error(`A job from the console has 1 to ${MOST_NONCES} nonces.`)
  return [...found]
}
