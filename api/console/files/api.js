// Requests to the API that served this page, with the key that this tab stores. Paths are relative, so that a proxy can serve the API under any path.
const KEY = 'proofline-key'

export class Refusal extends Error {
  constructor(status, message) {
    super(message)
    this.status = status
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null
export const setKey = key => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY))

/** Sends a request and returns the answer. Throws a Refusal with the API's error text if the status is not 2xx. */
export async function ask(path, { method = 'GET', body, signal } = {}) {
  const headers = {}
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`
  if (body !== undefined) headers['Content-Type'] = 'application/json'
  const answer = await fetch(new URL(path, document.baseURI), {
    method,
    headers,
    signal,
    cache: 'no-store',
    body: body === undefined ? undefined : JSON.stringify(body),
  })
  if (!answer.ok) throw new Refusal(answer.status, await reason(answer))
  return answer
}

export const askJson = async (path, options) => (await ask(path, options)).json()
export const send = (path, body) => askJson(path, { method: 'POST', body })

async function reason(answer) {
  try {
    const { detail } = await answer.json()
    if (typeof detail === 'string') return detail
    if (Array.isArray(detail)) return detail.map(({ loc, msg }) => `${loc.slice(1).join('.')}: ${msg}`).join('; ')
    return detail.message ?? JSON.stringify(detail)
  } catch {
    return `The API answered ${answer.status}.`
  }
}
