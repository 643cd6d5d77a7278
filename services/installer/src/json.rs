//! Finds the positions of values in JSON text. Accepts the same texts as Go's encoding/json in runtimes: strings of
//! invalid UTF-8, numbers of any size, and 10,000 levels. `serde_json`'s raw values reject such strings and have no
//! positions.

use std::ops::Range;

use crate::Malformed;

pub(crate) type Span = Range<usize>;

/// The depth at which Go's parser gives up.
const MAX_DEPTH: usize = 10_000;

#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) key: String,
    pub(crate) value: Span,
}

/// Finds the value of a text, around which only white space is allowed.
pub(crate) fn parse_value(text: &[u8]) -> Result<Span, Malformed> {
    let mut reader = Reader { text, at: 0 };
    if text.starts_with(b"\xef\xbb\xbf") {
        return Err(Malformed::ByteOrderMark);
    }
    reader.skip_whitespace();
    let value = reader.value()?;
    reader.skip_whitespace();
    match reader.peek() {
        None => Ok(value),
        Some(_) => Err(reader.error("unexpected data after the value")),
    }
}

/// Returns the members in order, including duplicates, or `None` if the value is no object.
pub(crate) fn members(text: &[u8], value: &Span) -> Option<Vec<Member>> {
    let mut reader = Reader::inside(text, value, b'{')?;
    let mut members = Vec::new();
    loop {
        reader.skip_whitespace();
        if reader.peek() != Some(b'"') {
            return Some(members);
        }
        let key = reader.string().ok()?;
        let key = string(text, &key)?;
        reader.skip_whitespace();
        reader.at += 1;
        reader.skip_whitespace();
        let value = reader.value().ok()?;
        members.push(Member { key, value });
        reader.skip_whitespace();
        if reader.peek() == Some(b',') {
            reader.at += 1;
        }
    }
}

/// Returns the positions of the elements, or `None` if the value is no array.
pub(crate) fn elements(text: &[u8], value: &Span) -> Option<Vec<Span>> {
    let mut reader = Reader::inside(text, value, b'[')?;
    let mut elements = Vec::new();
    loop {
        reader.skip_whitespace();
        if matches!(reader.peek(), Some(b']') | None) {
            return Some(elements);
        }
        elements.push(reader.value().ok()?);
        reader.skip_whitespace();
        if reader.peek() == Some(b',') {
            reader.at += 1;
        }
    }
}

/// Returns the text, with invalid UTF-8 replaced as in Go, or `None` if the value is no string.
pub(crate) fn string(text: &[u8], value: &Span) -> Option<String> {
    let quoted = text.get(value.clone())?;
    if quoted.first() != Some(&b'"') {
        return None;
    }
    let quoted = String::from_utf8_lossy(quoted);
    // Rust cannot represent a lone surrogate; no known name has one, so the raw text will do.
    Some(serde_json::from_str(&quoted).unwrap_or_else(|_| quoted.into_owned()))
}

/// Returns whether the value is a boolean or a string such as "true", as libcni accepts.
pub(crate) fn is_boolean(text: &[u8], value: &Span) -> bool {
    let raw = || text.get(value.clone()).map(String::from_utf8_lossy);
    let found = string(text, value).or_else(|| Some(raw()?.into_owned()));
    let is = |name| {
        found
            .as_ref()
            .is_some_and(|it| it.eq_ignore_ascii_case(name))
    };
    is("true") || is("false")
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn inside(text: &'a [u8], value: &Span, open: u8) -> Option<Self> {
        let reader = Self {
            text: text.get(..value.end)?,
            at: value.start,
        };
        (reader.peek() == Some(open)).then(|| Self {
            at: value.start + 1,
            ..reader
        })
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn error(&self, problem: &'static str) -> Malformed {
        let before = self.text.get(..self.at).unwrap_or(self.text);
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        Malformed::Json { line, problem }
    }

    fn skip_whitespace(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    /// Finds the end of a value without recursion; `open` is the stack of closing brackets.
    fn value(&mut self) -> Result<Span, Malformed> {
        let start = self.at;
        let mut open = Vec::new();
        loop {
            self.skip_whitespace();
            if open.len() >= MAX_DEPTH && matches!(self.peek(), Some(b'{' | b'[')) {
                return Err(self.error("nested too deeply"));
            }
            if let Some(close) = self.enter_value()? {
                open.push(close);
                continue;
            }
            if !self.finish_value(&mut open)? {
                return Ok(start..self.at);
            }
        }
    }

    /// Begins a value, and returns the closing bracket if the value is a container.
    fn enter_value(&mut self) -> Result<Option<u8>, Malformed> {
        match self.peek() {
            Some(b'{') => self.enter_container(b'}'),
            Some(b'[') => self.enter_container(b']'),
            Some(b'"') => self.string().map(|_| None),
            Some(b'-' | b'0'..=b'9') => self.number().map(|()| None),
            Some(b't') => self.skip_literal(b"true").map(|()| None),
            Some(b'f') => self.skip_literal(b"false").map(|()| None),
            Some(b'n') => self.skip_literal(b"null").map(|()| None),
            Some(_) => Err(self.error("expected a value")),
            None => Err(self.error("unexpected end, expected a value")),
        }
    }

    fn enter_container(&mut self, close: u8) -> Result<Option<u8>, Malformed> {
        self.at += 1;
        self.skip_whitespace();
        if self.peek() == Some(close) {
            self.at += 1;
            return Ok(None);
        }
        if close == b'}' {
            self.key()?;
        }
        Ok(Some(close))
    }

    /// Pops the containers that end after a value, and returns whether another value follows.
    fn finish_value(&mut self, open: &mut Vec<u8>) -> Result<bool, Malformed> {
        while let Some(close) = open.last().copied() {
            self.skip_whitespace();
            match self.peek() {
                Some(b',') => {
                    self.at += 1;
                    self.skip_whitespace();
                    if close == b'}' {
                        self.key()?;
                    }
                    return Ok(true);
                }
                Some(byte) if byte == close => {
                    self.at += 1;
                    open.pop();
                }
                Some(_) => return Err(self.error("expected a comma or a closing bracket")),
                None => return Err(self.error("unexpected end, expected a closing bracket")),
            }
        }
        Ok(false)
    }

    fn key(&mut self) -> Result<(), Malformed> {
        if self.peek() != Some(b'"') {
            return Err(self.error("expected a key"));
        }
        self.string()?;
        self.skip_whitespace();
        if self.peek() != Some(b':') {
            return Err(self.error("expected a colon"));
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<Span, Malformed> {
        let start = self.at;
        self.at += 1;
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(start..self.at);
                }
                Some(b'\\') => self.escape()?,
                Some(0x20..) => self.at += 1,
                Some(_) => return Err(self.error("control character in a string")),
                None => return Err(self.error("unterminated string")),
            }
        }
    }

    fn escape(&mut self) -> Result<(), Malformed> {
        self.at += 1;
        let length = match self.peek() {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 1,
            Some(b'u') => {
                let digits = self.text.get(self.at + 1..self.at + 5).unwrap_or_default();
                if digits.len() < 4 || !digits.iter().all(u8::is_ascii_hexdigit) {
                    return Err(self.error("malformed escape"));
                }
                5
            }
            Some(_) | None => return Err(self.error("malformed escape")),
        };
        self.at += length;
        Ok(())
    }

    fn number(&mut self) -> Result<(), Malformed> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), Malformed> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start {
            return Err(self.error("malformed number"));
        }
        Ok(())
    }

    fn skip_literal(&mut self, literal: &[u8]) -> Result<(), Malformed> {
        let rest = self.text.get(self.at..).unwrap_or_default();
        if !rest.starts_with(literal) {
            return Err(self.error("expected a value"));
        }
        self.at += literal.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_taken_if_and_only_if_serde_takes_it_where_it_is_text() {
        for text in [
            "{}",
            "[]",
            " [1, -0.5e+7 ,\"a\\u00e9\\\\\" ] ",
            "{\"a\":{\"b\":[null,true,false]}}",
            "1e400",
            "184467440737095516160",
            "",
            "{",
            "[1,]",
            "{\"a\"}",
            "{\"a\":}",
            "{,}",
            "01",
            "-",
            "1.",
            "1e",
            "\"\\x\"",
            "\"\\u12\"",
            "\"a\nb\"",
            "tru",
            "{} {}",
            "[1 2]",
            "{\"a\" 1}",
            "\"",
            "{\"a\":1,}",
            "[}",
            "nul",
            "+1",
        ] {
            let raw: Result<&serde_json::value::RawValue, _> = serde_json::from_str(text);
            assert_eq!(parse_value(text.as_bytes()).is_ok(), raw.is_ok(), "{text}");
        }
    }

    #[test]
    fn a_string_that_is_no_utf8_is_taken_as_runtimes_do() {
        let text = b"{\"a\xff\": \"\xc3\"}";
        let value = parse_value(text).unwrap();
        assert_eq!(members(text, &value).unwrap()[0].key, "a\u{fffd}");
    }

    #[test]
    fn deep_nesting_is_refused_as_runtimes_do_and_needs_no_stack() {
        let nested = |depth| [b"[".repeat(depth), b"]".repeat(depth)].concat();
        assert!(parse_value(&nested(MAX_DEPTH)).is_ok());
        assert!(parse_value(&nested(MAX_DEPTH + 1)).is_err());
    }

    #[test]
    fn an_error_names_its_line() {
        let error = parse_value(b"{\n \"a\": 1\n \"b\": 2 }").unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid JSON: line 3: expected a comma or a closing bracket"
        );
    }
}
