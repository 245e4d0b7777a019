// Where else to look. With a key, links cannot lead there, as they bring none: the page fetches and shows the text.
import { html } from './html.js'

const GRAFANA = 'proofline-grafana'

/** The address that somebody gave in this browser; null: none. */
export const grafana = () => localStorage.getItem(GRAFANA)

export function keepGrafana(url) {
  if (!url) return localStorage.removeItem(GRAFANA)
  if (!/^https?:\/\//.test(url)) throw new Error('An address begins with http:// or https://.')
  localStorage.setItem(GRAFANA, url)
}

export const Links = ({ known, act }) => {
  const flower = `http://${location.hostname}:5555`
  const open = path => () => act.open(path).catch(error => act.change({ jobProblem: error.message }))
  return html`<footer>
    <nav aria-label="Elsewhere">
      <ul>
        ${known.grafana && html`<li><a href=${known.grafana} rel="noreferrer">Grafana</a></li>`}
        <li><button class="link" onClick=${() => act.change({ dialog: 'grafana' })}>${known.grafana ? 'Another address of Grafana …' : 'Link to Grafana …'}</button></li>
        <li><a href=${flower} rel="noreferrer">Flower</a> <small>where proofline flower runs</small></li>
        ${known.hasKey
          ? html`<li><button onClick=${open('metrics')}>Metrics</button></li>
              <li><button onClick=${open('openapi.json')}>API reference (OpenAPI)</button></li>`
          : html`<li><a href="metrics">Metrics</a></li>
              <li><a href="docs">API reference</a></li>`}
      </ul>
    </nav>
  </footer>`
}
