// Which page is shown: the address after #, so that a page has a URL, wherever a proxy has put the console.
/** The id of the job or round whose page is shown; null: the overview. */
export const workOf = hash => /^#\/work\/([0-9a-z]{32})$/.exec(hash)?.[1] ?? null
export const toWork = id => `#/work/${id}`
