// Components that several sections use.
import { Component, createRef } from './vendor/preact.mjs'
import { html } from './html.js'

/** A sign for each kind of state, shown with the word, because some people do not see colours. */
const SIGNS = { good: '●', busy: '◐', bad: '▲', idle: '○' }
export const Chip = ({ kind, children }) =>
  html`<span class="chip ${kind}"><span aria-hidden="true">${SIGNS[kind]} </span>${children}</span>`

export const Facts = ({ of }) => html`<dl class="facts">
  ${of.filter(([, value]) => value !== null && value !== undefined && value !== '').map(
    ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`,
  )}
</dl>`

export const Section = ({ id, title, children, beside }) => html`<section id=${id} aria-labelledby="${id}-title">
  <div class="head"><h2 id="${id}-title">${title}</h2>${beside}</div>
  ${children}
</section>`

/** A table. On a phone, each row is shown as a card, and each cell with its column's name. `rows`: [key, cells]. */
export const Table = ({ name, columns, rows }) => html`<table class="rows" aria-label=${name}>
  <thead><tr>${columns.map(column => html`<th scope="col" key=${column}>${column}</th>`)}</tr></thead>
  <tbody>${rows.map(([key, cells]) => html`<tr key=${key}>${cells.map((cell, i) =>
    i ? html`<td key=${i} data-label=${columns[i]}>${cell}</td>` : html`<th key=${i} scope="row">${cell}</th>`,
  )}</tr>`)}</tbody>
</table>`

/** A drop-down list. `choices`: [value, name] for each choice; `choose` gets the chosen value. */
export const Choice = ({ label, value, choices, choose }) => html`<label class="filter">${label}
  <select value=${value} onChange=${event => choose(event.target.value)}>
    ${choices.map(([one, name]) => html`<option key=${one} value=${one} selected=${one === value}>${name}</option>`)}
  </select>
</label>`

/** A form. `fields`: [name, label, type or list of choices, initial value, hint or undefined]. `submit` gets the fields' texts by name. */
export class Form extends Component {
  constructor(props) {
    super(props)
    this.state = { problem: '', busy: false }
    this.send = async event => {
      event.preventDefault()
      const texts = Object.fromEntries(new FormData(event.target))
      this.setState({ problem: '', busy: true })
      try {
        await this.props.submit(texts)
        this.props.done()
      } catch (error) {
        this.setState({ problem: error.message, busy: false })
      }
    }
  }

  render({ id, fields, verb, done }, { problem, busy }) {
    return html`<form onSubmit=${this.send}>
      <div class="fields">${fields.map(field => html`<${Field} key=${field[0]} form=${id} field=${field} />`)}</div>
      ${problem && html`<p role="alert" class="problem">${problem}</p>`}
      <p class="buttons"><button class="main" disabled=${busy}>${verb}</button><button type="button" onClick=${done}>Not now</button></p>
    </form>`
  }
}

const Field = ({ form, field: [name, label, kind, value, hint] }) => {
  const id = `${form}-${name}`
  const about = hint ? `${id}-hint` : undefined
  return html`<div class="field">
    <label for=${id}>${label}</label>
    ${Array.isArray(kind)
      ? html`<select id=${id} name=${name} aria-describedby=${about}>
          ${kind.map(choice => html`<option key=${choice}>${choice}</option>`)}
        </select>`
      : html`<input id=${id} name=${name} type=${kind} defaultValue=${value} aria-describedby=${about}
          required=${kind === 'number'} autocomplete="off" spellcheck="false" />`}
    ${hint && html`<small id=${about}>${hint}</small>`}
  </div>`
}

/** A modal dialog. The browser keeps the focus in the dialog, and restores it afterwards. */
export class Dialog extends Component {
  element = createRef()
  closed = () => {
    if (!this.gone) this.props.close()
  }

  componentDidMount() {
    this.element.current.showModal()
  }

  componentWillUnmount() {
    this.gone = true
    this.element.current.close() // else the focus would not go back to where it was
  }

  render({ title, children, kind = '' }) {
    return html`<dialog ref=${this.element} class=${kind} aria-labelledby="dialog-title" onClose=${this.closed}>
      <h2 id="dialog-title">${title}</h2>
      ${children}
    </dialog>`
  }
}
