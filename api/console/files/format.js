// Formats numbers and times for people.
const WHOLE = new Intl.NumberFormat('en', { maximumFractionDigits: 0 })
const SHORT = new Intl.NumberFormat('en', { maximumSignificantDigits: 3 })

export const count = n => WHOLE.format(n ?? 0)
export const rate = n => (n >= 100 ? WHOLE : SHORT).format(n ?? 0)
export const size = bytes => {
  const units = ['B', 'KiB', 'MiB', 'GiB']
  let unit = 0
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024
  return `${SHORT.format(bytes)} ${units[unit]}`
}

/** Formats a duration in seconds: 75 -> "1 min 15 s". */
export const duration = seconds => {
  const s = Math.max(0, Math.round(seconds))
  if (s < 60) return `${s} s`
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`
}
/** Formats a short duration in seconds: 0.042 -> "42 ms". */
export const seconds = s => (s < 1 ? `${WHOLE.format(s * 1000)} ms` : `${SHORT.format(s)} s`)
export const clock = at => new Date(at * 1000).toLocaleTimeString('en-GB')
/** Formats a time of day, with the date if it is not today. */
export const moment = at => {
  const [day, today] = [new Date(at * 1000), new Date()]
  const date = day.toDateString() === today.toDateString() ? '' : `${day.toLocaleDateString('en-GB', { day: 'numeric', month: 'short' })} `
  return date + clock(at)
}
export const plural = (n, one) => `${count(n)} ${one}${n === 1 ? '' : 's'}`
