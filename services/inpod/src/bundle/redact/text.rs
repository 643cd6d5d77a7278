//! Finds secrets and addresses in text by their format.

use std::net::IpAddr;

use super::REDACTED;

/// The first line of a key or a certificate starts with this text (RFC 7468).
const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";

/// Redacts keys and certificates. A block without an end is redacted up to the end of the text.
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

fn is_token_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '+' | '/' | '~')
}

/// Returns whether the token looks like a JSON Web Token (RFC 7519): three parts, starting with `{"` in base64url.
fn is_jwt(token: &str) -> bool {
    token.contains("eyJ") && token.split('.').count() >= 3 && token.len() > 30
}

/// Splits text into alternating gaps and tokens, starting with a gap.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    let mut token = false;
    while !rest.is_empty() {
        let end = rest
            .find(|c| is_token_char(c) != token)
            .unwrap_or(rest.len());
        let (piece, after) = rest.split_at(end);
        pieces.push(piece);
        (rest, token) = (after, !token);
    }
    pieces
}

/// The next part of the text to redact.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ahead {
    Nothing,
    Token,
    /// The text up to the closing quote.
    Quoted(char),
}

/// Redacts tokens, and the values of keys that name secrets.
pub(super) fn without_tokens(text: &str, is_secret: &dyn Fn(&str) -> bool) -> String {
    let mut clean = String::with_capacity(text.len());
    let (mut last, mut ahead) = ("", Ahead::Nothing);
    // Pieces at even positions are gaps, pieces at odd positions are tokens.
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
        clean += if ahead == Ahead::Token || is_jwt(piece) {
            REDACTED
        } else {
            piece
        };
        last = piece;
        ahead = Ahead::Nothing;
    }
    clean
}

/// Decides from a token and the gap behind it whether a secret follows.
fn value_follows(token: &str, gap: &str, is_secret: &dyn Fn(&str) -> bool) -> Ahead {
    let scheme = ["bearer", "basic"]
        .iter()
        .any(|it| token.eq_ignore_ascii_case(it));
    if scheme && gap.trim().is_empty() && !gap.is_empty() {
        return Ahead::Token;
    }
    // Matches `key: value`, `key=value` and `"key": "value"`, with backslashes for JSON within JSON.
    let assigns = gap.trim_matches(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '\\'));
    if !is_secret(token) || !matches!(assigns, ":" | "=") {
        return Ahead::Nothing;
    }
    let after = gap.rsplit([':', '=']).next().unwrap_or_default();
    match after.chars().last() {
        Some(quote @ ('"' | '\'')) => Ahead::Quoted(quote),
        Some(_) | None => Ahead::Token,
    }
}

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

/// Replaces an address, which may be followed by a full stop or a colon, and an IPv4 address also by a port.
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
