//! Secrets and addresses in plain text, by their form.

use std::net::IpAddr;

use super::REDACTED;

/// What begins and ends a key or a certificate (RFC 7468).
const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";

/// Text without keys and certificates. One that does not end goes to the end of the text.
pub(super) fn without_keys(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, block)) = rest.split_once(BEGIN) {
        clean += before;
        clean += REDACTED;
        rest = match block.split_once(END) {
            Some((_, after)) => after.split_once("-----").map_or("", |(_, after)| after),
            None => "",
        };
    }
    clean + rest
}

fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '+' | '/' | '~')
}

/// A JSON Web Token (RFC 7519) begins with `{"` in base64url and has three parts.
fn is_jwt(word: &str) -> bool {
    word.contains("eyJ") && word.split('.').count() >= 3 && word.len() > 30
}

/// Words and what stands between them, in turn.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    let mut word = false;
    while !rest.is_empty() {
        let end = rest.find(|c| is_of_word(c) != word).unwrap_or(rest.len());
        let (piece, after) = rest.split_at(end);
        pieces.push(piece);
        (rest, word) = (after, !word);
    }
    pieces
}

/// What is redacted next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ahead {
    Nothing,
    /// The next word.
    Word,
    /// Everything up to this quote.
    Quoted(char),
}

/// Text without tokens, and without the values of keys that name secrets.
pub(super) fn without_tokens(text: &str, is_secret: &dyn Fn(&str) -> bool) -> String {
    let mut clean = String::with_capacity(text.len());
    let (mut last, mut ahead) = ("", Ahead::Nothing);
    // A gap and a word in turn, a gap first.
    for (index, piece) in pieces(text).into_iter().enumerate() {
        let is_word = index % 2 == 1;
        if let Ahead::Quoted(quote) = ahead {
            if let Some((_, after)) = piece.split_once(quote) {
                clean.push(quote);
                clean += after;
                ahead = Ahead::Nothing;
            }
            continue;
        }
        if !is_word {
            clean += piece;
            ahead = value_follows(last, piece, is_secret);
            if matches!(ahead, Ahead::Quoted(_)) {
                clean += REDACTED;
            }
            continue;
        }
        clean += if ahead == Ahead::Word || is_jwt(piece) {
            REDACTED
        } else {
            piece
        };
        last = piece;
        ahead = Ahead::Nothing;
    }
    clean
}

/// Whether a secret follows a word and what stands after it.
fn value_follows(word: &str, gap: &str, is_secret: &dyn Fn(&str) -> bool) -> Ahead {
    let scheme = ["bearer", "basic"]
        .iter()
        .any(|it| word.eq_ignore_ascii_case(it));
    if scheme && gap.trim().is_empty() && !gap.is_empty() {
        return Ahead::Word;
    }
    // `key: value`, `key=value`, `"key": "value"`, with backslashes where JSON is in JSON.
    let assigns = gap.trim_matches(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '\\'));
    if !is_secret(word) || !matches!(assigns, ":" | "=") {
        return Ahead::Nothing;
    }
    let after = gap.rsplit([':', '=']).next().unwrap_or_default();
    match after.chars().last() {
        Some(quote @ ('"' | '\'')) => Ahead::Quoted(quote),
        Some(_) | None => Ahead::Word,
    }
}

/// Text with other words for addresses.
pub(super) fn without_addresses(text: &str, mut other: impl FnMut(IpAddr) -> String) -> String {
    let is_of_address = |c: char| c.is_ascii_hexdigit() || matches!(c, '.' | ':');
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let start = rest.find(is_of_address).unwrap_or(rest.len());
        let (before, from) = rest.split_at(start);
        let end = from.find(|c| !is_of_address(c)).unwrap_or(from.len());
        let (found, after) = from.split_at(end);
        clean += before;
        clean += &replaced(found, &mut other);
        rest = after;
    }
    clean
}

/// An address, or one of IPv4 and a port; a stop or colon may follow.
fn replaced(found: &str, other: &mut impl FnMut(IpAddr) -> String) -> String {
    let bare = found.trim_end_matches('.');
    for end in [
        bare.len(),
        bare.trim_end_matches(':').len(),
        bare.find(':').unwrap_or(0),
    ] {
        let (address, rest) = found.split_at(end);
        if let Ok(address) = address.parse() {
            return other(address) + rest;
        }
    }
    found.to_owned()
}
