// Follows the node's state through server-sent events. Reads them with fetch, because EventSource cannot send a key.
import { Refusal, ask } from './api.js'

const FIRST_PAUSE_MS = 500
const LONGEST_PAUSE_MS = 10_000
// Milliseconds of silence after which the connection counts as lost: the API sends something every second.
const SILENCE_MS = 15_000

/**
 * Calls on.sections with the changed sections, and on.lost when the API does not answer. Reconnects until the API
 * refuses the key; then calls on.refused and returns.
 */
export async function follow(on) {
  let pauseMs = FIRST_PAUSE_MS
  for (;;) {
    try {
      for await (const sections of events()) {
        pauseMs = FIRST_PAUSE_MS
        on.sections(sections)
      }
    } catch (error) {
      if (error instanceof Refusal && (error.status === 401 || error.status === 403)) return on.refused(error)
      on.lost()
    }
    await new Promise(resolve => setTimeout(resolve, pauseMs * (0.5 + Math.random() / 2)))
    pauseMs = Math.min(LONGEST_PAUSE_MS, pauseMs * 2)
  }
}

async function* events() {
  const abort = new AbortController()
  let watch = setTimeout(() => abort.abort(), SILENCE_MS)
  try {
    const answer = await ask('api/v1/console/events', { signal: abort.signal })
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
    let waiting = ''
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      clearTimeout(watch)
      watch = setTimeout(() => abort.abort(), SILENCE_MS)
      const parts = (waiting + value).split('\n\n')
      waiting = parts.pop()
      for (const part of parts) if (part.startsWith('data: ')) yield JSON.parse(part.slice('data: '.length))
    }
  } finally {
    clearTimeout(watch)
    abort.abort()
  }
}
